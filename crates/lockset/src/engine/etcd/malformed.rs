//! What another program may have stored, or a server that is not etcd may send. The checks are run
//! by property tests and by `fuzz/`.

use super::keys::{EtcdLayout, first_claim_id, lease_id_in};
use super::record::{KeyRecord, claim_id_of};
use super::rpc::KeyValue;
use crate::name::Note;

/// A key and a value below the prefix of the locks, whatever wrote them.
#[allow(clippy::unwrap_used, clippy::panic, reason = "checks")]
pub(crate) fn check_key_value(key: &[u8], value: &[u8]) {
    let record = KeyRecord::decode(value);
    // Only a record of this library may have a longer text.
    let is_record = serde_json::from_slice::<KeyRecord>(value).is_ok();
    assert!(is_record || record.note.len() <= Note::MAX_LEN, "{} bytes", record.note.len());
    assert_eq!(KeyRecord::decode(&record.encode()), record, "it is written as it was read");
    for raw_names in [false, true] {
        let layout = EtcdLayout::new("p", raw_names);
        if let Some(name) = layout.name_of(key) {
            let range = layout.claims(&name);
            // The text of another program may escape more than is necessary.
            let is_cell = layout.is_reserved(key);
            let canonical = *range.first <= *key && *key < *range.end;
            assert!(is_cell || canonical || key.contains(&b'%'), "{name} is not at {key:?}");
            assert!(canonical || !layout.is_own_claim_key(&name, key));
        }
    }
    let kv = KeyValue { key: key.to_vec(), value: value.to_vec(), ..KeyValue::default() };
    assert!(claim_id_of(&kv, &record).is_none() || first_claim_id(key).is_some());
    let _ = lease_id_in(key);
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::super::record::token_from_revision;
    use super::*;
    use crate::token::Token;

    proptest! {
        #[test]
        fn any_key_and_value_are_understood(
            key in prop::collection::vec(any::<u8>(), 0..60),
            value in prop::collection::vec(any::<u8>(), 0..60),
        ) {
            check_key_value(&key, &value);
            check_key_value(&[b"p/", &key[..]].concat(), &value);
        }

        #[test]
        fn keys_and_records_like_ours_are_understood(
            key in "p/{1,2}(cell/)?[a%/25F]{0,6}/[0-9a-f]{0,17}-?[0-9a-f]{30,33}",
            value in r#"\{("v":"v1",)?"mode":("exclusive"|"shared"|\{"permits":\{"take":[0-9]{1,12},"limit":3\}\}),"ttl_ms":-?[0-9]{1,22},"by":"[a-z]{0,3}","note":"\PC{0,9}"\}"#,
        ) {
            check_key_value(key.as_bytes(), value.as_bytes());
        }

        #[test]
        fn any_revision_is_a_token_or_rejected(revision in any::<i64>()) {
            if let Ok(token) = token_from_revision(revision) {
                prop_assert!(token <= Token::MAX && token.get() == revision.unsigned_abs());
            }
        }

        #[test]
        fn long_values_of_other_programs_are_shortened(value in "\\PC{1000,1500}") {
            check_key_value(b"p/a/1", value.as_bytes());
        }
    }
}
