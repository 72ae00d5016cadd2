//! Names, prefixes, notes and fencing tokens.
#![no_main]

use lockset::fence::FencingToken;
use lockset::{Name, Note, Prefix};

libfuzzer_sys::fuzz_target!(|text: &str| {
    let _ = (text.parse::<Name>(), text.parse::<Prefix>(), Note::new(text));
    if let Ok(token) = text.parse::<FencingToken>() {
        assert_eq!(token.to_string().parse::<FencingToken>().ok(), Some(token));
    }
    let segments: Vec<&str> = text.split('|').collect();
    if let Ok(name) = Name::try_from(&segments[..]) {
        assert_eq!(name.as_str().split('/').count(), segments.len());
    }
});
