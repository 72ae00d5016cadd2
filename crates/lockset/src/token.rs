//! Fencing tokens.

use std::fmt;
use std::num::ParseIntError;
use std::str::FromStr;

use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// A fencing token: a number that strictly grows per name over all grants of that name.
///
/// Send it along with every write to the protected resource, and let the resource refuse a token
/// lower than the greatest it has seen. That closes the one gap no lock can close by itself: a
/// process that was paused beyond its lease and then goes on.
///
/// Tokens of different names are not comparable. They are not dense: only their order means
/// something. In JSON they are strings, because many readers turn large numbers into doubles.
///
/// ```
/// use lockset::Token;
/// let token: Token = "1700000000000001".parse()?;
/// assert!(token < Token::new(1700000000000002));
/// # Ok::<(), std::num::ParseIntError>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Token(u64);

impl Token {
    /// Tokens stay below 2^53, so that they survive languages whose numbers are doubles.
    pub const MAX: Token = Token((1 << 53) - 1);

    /// The token with this value.
    pub const fn new(value: u64) -> Self {
        Self(value)
    }

    /// The token as a number.
    pub const fn get(self) -> u64 {
        self.0
    }

    /// The token that a grant takes on a name whose last token was `fence`, by the rule every
    /// engine with a fence of its own follows: above the last one and not below `at_least`.
    pub(crate) fn next(fence: u64, at_least: u64) -> Token {
        Token(fence.saturating_add(1).max(at_least))
    }
}

impl fmt::Display for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl FromStr for Token {
    type Err = ParseIntError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        text.parse().map(Token)
    }
}

impl Serialize for Token {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for Token {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = String::deserialize(deserializer)?;
        text.parse().map_err(serde::de::Error::custom)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_next_token_is_above_the_fence_and_not_below_the_floor() {
        assert_eq!(Token::next(7, 0), Token(8));
        assert_eq!(Token::next(7, 8), Token(8));
        assert_eq!(Token::next(7, 100), Token(100));
    }

    #[test]
    fn json_carries_tokens_as_strings() {
        let json = serde_json::to_string(&Token::MAX).unwrap();
        assert_eq!(json, "\"9007199254740991\"");
        assert_eq!(serde_json::from_str::<Token>(&json).unwrap(), Token::MAX);
    }
}
