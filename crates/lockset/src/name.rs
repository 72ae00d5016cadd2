//! Lock names, prefixes of names, and notes: text that travels to an engine, checked once.

use std::cmp::Ordering;
use std::fmt;
use std::hash::{Hash, Hasher};
use std::str::FromStr;
use std::sync::{Arc, Mutex};

use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};
use crate::fork;
use crate::hash::hash_of;
use crate::sync;

/// The name of a lock: UTF-8 of 1 to 255 bytes, segments separated by `/`.
///
/// Refused are control characters, empty segments (so no leading, trailing or double slash), the
/// segments `.` and `..`, and spaces at either end. Two different names are always two different
/// locks: names are compared byte by byte, nothing is folded or normalised.
///
/// ```
/// use lockset::Name;
/// let name: Name = "orders/42".parse()?;
/// assert!("orders/../42".parse::<Name>().is_err());
/// # Ok::<(), lockset::Error>(())
/// ```
#[derive(Clone, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Name {
    text: Arc<str>,
    hash: u64,
}

impl Name {
    /// The longest name, in bytes.
    pub const MAX_LEN: usize = 255;

    /// The name as text.
    pub fn as_str(&self) -> &str {
        &self.text
    }

    /// This name below the namespace `outer`: `outer/self`.
    pub(crate) fn below(&self, outer: &Name) -> Result<Name> {
        format!("{outer}/{self}").parse()
    }
}

impl FromStr for Name {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        match name_fault(text) {
            None => Ok(Self { text: text.into(), hash: hash_of(text) }),
            Some(why) => Err(Error::invalid("lock name", text, why)),
        }
    }
}

/// Why `text` is not a name, in words that follow "the lock name … is not valid:".
fn name_fault(text: &str) -> Option<String> {
    if text.is_empty() {
        return Some("it is empty".into());
    }
    if text.len() > Name::MAX_LEN {
        return Some(format!("it has {} bytes, at most {} fit", text.len(), Name::MAX_LEN));
    }
    if let Some(c) = text.chars().find(|c| c.is_control()) {
        return Some(format!("it contains the control character {:?}", c));
    }
    if text.trim() != text {
        return Some("it begins or ends with white space".into());
    }
    if text.ends_with('/') {
        return Some("it ends with a slash".into());
    }
    for segment in text.split('/') {
        match segment {
            "" => return Some("it has an empty segment (a leading or double slash)".into()),
            "." | ".." => return Some(format!("the segment `{segment}` is not allowed")),
            _ => {}
        }
    }
    None
}

impl TryFrom<String> for Name {
    type Error = Error;

    fn try_from(text: String) -> Result<Self> {
        text.parse()
    }
}

impl TryFrom<&str> for Name {
    type Error = Error;

    fn try_from(text: &str) -> Result<Self> {
        text.parse()
    }
}

impl From<Name> for String {
    fn from(name: Name) -> String {
        name.as_str().to_owned()
    }
}

impl fmt::Display for Name {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(&self.text)
    }
}

impl fmt::Debug for Name {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(&self.text, f)
    }
}

impl PartialEq for Name {
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.text, &other.text) || self.text == other.text
    }
}

impl Eq for Name {}

impl PartialOrd for Name {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Name {
    fn cmp(&self, other: &Self) -> Ordering {
        self.text.cmp(&other.text)
    }
}

impl Hash for Name {
    fn hash<H: Hasher>(&self, state: &mut H) {
        state.write_u64(self.hash);
    }
}

/// What a listing or a watch looks at: every name that begins with this text. The empty prefix
/// looks at all.
///
/// ```
/// use lockset::{Name, Prefix};
/// let prefix: Prefix = "orders/".parse()?;
/// assert!(prefix.covers(&"orders/42".parse::<Name>()?));
/// # Ok::<(), lockset::Error>(())
/// ```
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Prefix(String);

impl Prefix {
    /// The prefix as text.
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// Whether `name` begins with this prefix.
    pub fn covers(&self, name: &Name) -> bool {
        name.as_str().starts_with(&self.0)
    }

    pub(crate) fn below(&self, outer: &Name) -> Prefix {
        Prefix(format!("{outer}/{}", self.0))
    }
}

impl FromStr for Prefix {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        if text.len() > Name::MAX_LEN {
            let why = format!("it has {} bytes, at most {} fit", text.len(), Name::MAX_LEN);
            return Err(Error::invalid("prefix", text, why));
        }
        if text.chars().any(char::is_control) {
            return Err(Error::invalid("prefix", text, "it contains a control character"));
        }
        Ok(Self(text.to_owned()))
    }
}

/// What a claim says about itself to whoever looks: who it is, and a text of the user's.
///
/// A note is information, never identity: nothing is decided by it. An election shows the leader's
/// note to its followers.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Note {
    /// The process, as `pid@host`; empty where the engine could not carry it.
    pub by: Arc<str>,
    /// The user's own text.
    pub text: Arc<str>,
}

impl Note {
    /// The longest text of a note, in bytes.
    pub const MAX_LEN: usize = 1024;

    /// A note of this process with the given text.
    ///
    /// # Errors
    /// [`Error::Invalid`] if the text is longer than [`Note::MAX_LEN`] or contains a control
    /// character.
    pub fn new(text: &str) -> Result<Self> {
        if text.len() > Self::MAX_LEN {
            let why = format!("it has {} bytes, at most {} fit", text.len(), Self::MAX_LEN);
            return Err(Error::invalid("note", text, why));
        }
        if text.chars().any(char::is_control) {
            return Err(Error::invalid("note", text, "it contains a control character"));
        }
        Ok(Self { by: this_process(), text: text.into() })
    }
}

/// `pid@host`, computed once in each process: a forked child is not its parent.
pub(crate) fn this_process() -> Arc<str> {
    static LABEL: Mutex<Option<(u32, Arc<str>)>> = Mutex::new(None);
    fork::notice();
    let process = fork::generation();
    let mut label = sync::lock(&LABEL);
    match &*label {
        Some((of, text)) if *of == process => text.clone(),
        _ => {
            let host = rustix::system::uname().nodename().to_string_lossy().into_owned();
            let text: Arc<str> = format!("{}@{host}", std::process::id()).into();
            *label = Some((process, text.clone()));
            text
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_that_could_confuse_are_refused_with_the_reason() {
        for (text, reason) in [
            ("", "empty"),
            ("a/", "ends with a slash"),
            ("/a", "empty segment"),
            ("a//b", "empty segment"),
            ("a/../b", "`..`"),
            (".", "`.`"),
            ("a\nb", "control character"),
            ("a\u{85}b", "control character"),
            (" a", "white space"),
            (&"x".repeat(256), "256 bytes"),
        ] {
            let error = text.parse::<Name>().unwrap_err().to_string();
            assert!(error.contains(reason), "{text:?}: {error}");
        }
    }

    #[test]
    fn ordinary_names_pass_unchanged() {
        for text in ["a", "jobs/42", "größe", "a b", "...", "{tag}:x", &"y".repeat(255)] {
            assert_eq!(text.parse::<Name>().unwrap().as_str(), text);
        }
    }

    #[test]
    fn notes_are_bounded() {
        assert!(Note::new(&"é".repeat(600)).is_err());
        assert!(Note::new("line\nbreak").is_err());
        assert!(Note::new("nightly backup").unwrap().by.contains('@'));
    }
}
