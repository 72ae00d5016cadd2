//! Numbers and ids as text, without the detours of `fmt`: every lock that is acquired needs some.

use crate::engine::ClaimId;

/// Appends the 32 hexadecimal digits of an id.
pub(super) fn push_id(buffer: &mut Vec<u8>, id: ClaimId) {
    const DIGITS: &[u8; 16] = b"0123456789abcdef";
    let mut text = [0; 32];
    for (pair, byte) in text.chunks_exact_mut(2).zip(id.to_bits().to_be_bytes()) {
        pair[0] = DIGITS[usize::from(byte >> 4)];
        pair[1] = DIGITS[usize::from(byte & 15)];
    }
    buffer.extend_from_slice(&text);
}

/// Appends a number.
pub(super) fn push_number(buffer: &mut Vec<u8>, mut number: u64) {
    let mut text = [b'0'; 20];
    let mut start = text.len();
    while number > 0 || start == text.len() {
        start -= 1;
        text[start] = b'0' + (number % 10) as u8;
        number /= 10;
    }
    buffer.extend_from_slice(&text[start..]);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_and_ids_are_written_as_fmt_does() {
        for number in [0, 7, 10, 1_234_567_890, u64::MAX] {
            let mut text = b"|".to_vec();
            push_number(&mut text, number);
            assert_eq!(text, format!("|{number}").as_bytes());
        }
        for bits in [0, 1, 0x0123_4567_89ab_cdef << 40, u128::MAX] {
            let (id, mut text) = (ClaimId::from_bits(bits), b"|".to_vec());
            push_id(&mut text, id);
            assert_eq!(text, format!("|{id}").as_bytes());
        }
    }
}
