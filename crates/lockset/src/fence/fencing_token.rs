//! A token together with the lock that it belongs to.

use std::fmt;
use std::str::FromStr;

use crate::error::{Error, Result};
use crate::guard::Guard;
use crate::name::Name;
use crate::token::Token;
use crate::url::{percent_decode, percent_encode};

use super::FenceError;

/// The greatest token that a store accepts: that of a signed 64-bit column.
const MAX_TOKEN: u64 = i64::MAX as u64;

/// A [`Token`] and the lock it was granted for: what a write presents to a fence.
///
/// `&guard` converts into it. A token that travelled without its guard is given a lock by
/// [`new`](FencingToken::new). As text it is `name=token`, with the bytes of the name other than
/// ASCII letters, digits and `-._~/` written as `%` and two hexadecimal digits; the HTTP header
/// `Lockset-Token` contains this text.
///
/// ```
/// use lockset::{Token, fence::FencingToken};
/// let token = FencingToken::new("orders/42", Token::new(17))?;
/// assert_eq!(token.to_string(), "orders/42=17");
/// assert_eq!("orders/42=17".parse::<FencingToken>()?, token);
/// assert!("orders/42=0".parse::<FencingToken>().is_err());
/// # Ok::<(), lockset::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct FencingToken {
    lock: Name,
    token: Token,
}

impl FencingToken {
    /// The token of this lock.
    ///
    /// # Errors
    /// [`Error::Invalid`] if the name is not valid, or the token is 0 or above 2^63 − 1.
    pub fn new(lock: impl TryInto<Name, Error: Into<Error>>, token: Token) -> Result<Self> {
        let lock = lock.try_into().map_err(Into::into)?;
        match token.get() {
            1..=MAX_TOKEN => Ok(Self { lock, token }),
            value => Err(Error::invalid("token", &value.to_string(), RANGE)),
        }
    }

    /// The lock.
    pub fn lock(&self) -> &Name {
        &self.lock
    }

    /// The token.
    pub fn token(&self) -> Token {
        self.token
    }

    /// The token as a signed number, for databases.
    pub fn as_i64(&self) -> i64 {
        // Both constructors keep tokens in this range.
        i64::try_from(self.token.get()).unwrap_or(i64::MAX)
    }

    pub(crate) fn check_lock(&self, resource: &Name, lock: &Name) -> Result<(), FenceError> {
        if self.lock == *lock {
            return Ok(());
        }
        let (expected, given) = (lock.clone(), self.lock.clone());
        Err(FenceError::WrongLock { resource: resource.clone(), expected, given })
    }
}

const RANGE: &str = "it is a whole number from 1 to 9223372036854775807";

/// The tokens of a guard are in range: engines grant from 1 on, and below 2^53 + 2^52.
impl From<&Guard> for FencingToken {
    fn from(guard: &Guard) -> Self {
        Self { lock: guard.name().clone(), token: guard.token() }
    }
}

impl From<&FencingToken> for FencingToken {
    fn from(token: &FencingToken) -> Self {
        token.clone()
    }
}

impl fmt::Display for FencingToken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let segments: Vec<String> = self.lock.as_str().split('/').map(percent_encode).collect();
        write!(f, "{}={}", segments.join("/"), self.token)
    }
}

impl FromStr for FencingToken {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let invalid = |why: &str| Error::invalid("fencing token", text, why);
        let (lock, token) =
            text.rsplit_once('=').ok_or_else(|| invalid("it has the form `name=token`"))?;
        let lock = percent_decode(lock).ok_or_else(|| invalid("the name is not UTF-8"))?;
        // `u64::from_str` also takes a sign.
        let is_number = !token.is_empty() && token.bytes().all(|byte| byte.is_ascii_digit());
        let number = is_number.then(|| token.parse().ok()).flatten();
        let token = number.ok_or_else(|| invalid(&format!("of the token: {RANGE}")))?;
        Self::new(lock, token)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn every_name_survives_the_text() {
        for name in ["a", "orders/42", "a=b", "ä ö", "100%", "a%2Fb", "a,b;c", "x\"y"] {
            let token = FencingToken::new(name, Token::new(7)).unwrap();
            let text = token.to_string();
            assert!(text.is_ascii() && !text.contains([' ', ',', ';', '"']), "{text}");
            assert_eq!(text.parse::<FencingToken>().unwrap(), token);
        }
    }

    #[test]
    fn what_is_not_a_token_is_rejected() {
        let wrong = [
            "",
            "a",
            "=1",
            "a=",
            "a=-1",
            "a=+1",
            "a=0",
            "a=9223372036854775808",
            "a=99999999999999999999",
            "a=1x",
            "a= 1",
            "/a=1",
            "%ff=1",
            "a%00=1",
        ];
        for text in wrong {
            assert!(text.parse::<FencingToken>().is_err(), "{text:?}");
        }
        let greatest: FencingToken = "a=9223372036854775807".parse().unwrap();
        assert_eq!(greatest.as_i64(), i64::MAX);
    }

    proptest! {
        #[test]
        fn any_text_is_a_token_or_rejected(text in "\\PC{0,40}|[a/%2F=é]{0,9}=[0-9+]{1,21}") {
            if let Ok(token) = text.parse::<FencingToken>() {
                prop_assert!(token.as_i64() >= 1);
                prop_assert_eq!(token.to_string().parse::<FencingToken>().unwrap(), token);
            }
        }

        #[test]
        fn any_name_and_number_survive_the_text(name in "\\PC{1,20}", number in 1..=MAX_TOKEN) {
            let Ok(token) = FencingToken::new(name, Token::new(number)) else { return Ok(()) };
            let text = token.to_string();
            prop_assert!(text.bytes().all(|byte| byte.is_ascii_graphic() && byte != b','));
            prop_assert_eq!(text.parse::<FencingToken>().unwrap(), token);
        }
    }
}
