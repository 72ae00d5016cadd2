//! Frames of a server that is not what it claims to be. The check is run by a property test and by
//! `fuzz/`.

use super::wire::{ConnectResponse, JuteReader, NodeEvent, ReplyHeader, multi_error};

/// A frame, given to every reader. What is read is no larger than what was received.
#[allow(clippy::panic, reason = "checks")]
pub(crate) fn check_frame(frame: &[u8]) {
    if let Ok(Some(response)) = ConnectResponse::read(frame) {
        assert!(response.timeout_ms > 0 && response.session_id != 0, "an expired session");
        assert!(response.password.len() <= frame.len());
    }
    let reader = JuteReader(frame);
    let mut rest = reader;
    if ReplyHeader::read(&mut rest).is_ok() {
        assert_eq!(rest.0.len() + 16, frame.len());
        let _ = NodeEvent::read(&mut rest);
        let _ = multi_error(rest.0);
    }
    if let Ok((index, _)) = multi_error(frame).map(|failed| failed.unzip()) {
        assert!(index.unwrap_or(0) * 13 <= frame.len(), "more results than bytes");
    }
    if let Ok(strings) = { reader }.strings() {
        let bytes: usize = strings.iter().map(|string| 4 + string.len()).sum();
        assert!(bytes + 4 <= frame.len() && strings.capacity() <= frame.len() / 4);
    }
    let (mut data, mut path) = (reader, reader);
    let _ = data.buffer().and_then(|_| data.stat());
    let _ = path.string().and_then(|_| path.stat());
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Integers as they occur in frames: small, negative or beyond every bound.
    fn int() -> impl Strategy<Value = Vec<u8>> {
        prop_oneof![-4_i32..20, any::<i32>(), Just(i32::MAX), Just(i32::MIN)]
            .prop_map(|int| int.to_be_bytes().to_vec())
    }

    proptest! {
        #[test]
        fn any_frame_is_read_or_rejected(frame in prop::collection::vec(any::<u8>(), 0..120)) {
            check_frame(&frame);
        }

        #[test]
        fn frames_of_plausible_numbers_are_read_or_rejected(
            ints in prop::collection::vec(int(), 0..12),
            tail in prop::collection::vec(any::<u8>(), 0..20),
        ) {
            check_frame(&[ints.concat(), tail].concat());
        }
    }
}
