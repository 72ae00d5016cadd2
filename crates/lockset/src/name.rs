//! Lock names, prefixes of names, and notes: text that travels to an engine, checked once.

use std::cmp::Ordering;
use std::fmt::{self, Write as _};
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
/// Control characters, empty segments (so no leading, trailing or double slash), the segments `.`
/// and `..`, and white space at either end are rejected. Two different names are always two
/// different locks: names are compared byte by byte, nothing is folded or normalised.
///
/// A text is taken as it is, with its slashes. An array, slice or vector of texts is a list of
/// segments, each of which is escaped, so that a segment from outside the program cannot add
/// another one: in a segment the bytes of `/`, `%`, control characters and white space at either
/// end, and the dots of `.` and `..`, are written as `%` and two hexadecimal digits. Different
/// lists are different names. An empty segment is rejected.
///
/// ```
/// use lockset::Name;
/// let name: Name = "orders/42".parse()?;
/// assert!("orders/../42".parse::<Name>().is_err());
///
/// let customer = "7/../8"; // user input
/// assert_eq!(Name::try_from(["orders", customer])?.as_str(), "orders/7%2F..%2F8");
/// assert_eq!(Name::try_from(["orders", "42"])?, name);
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

    /// The name made of these segments; see [`Name`].
    fn from_segments<S: AsRef<str>>(segments: &[S]) -> Result<Self> {
        let mut text = String::new();
        for (index, segment) in segments.iter().enumerate() {
            if segment.as_ref().is_empty() {
                let why = format!("segment {} is empty", index + 1);
                return Err(Error::invalid("lock name", &text, why));
            }
            if index > 0 {
                text.push('/');
            }
            escape(segment.as_ref(), &mut text);
        }
        text.parse()
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

/// Writes `segment` so that it is one segment of a name, and no other segment is written the same.
fn escape(segment: &str, text: &mut String) {
    let start = segment.len() - segment.trim_start().len();
    let end = segment.trim_end().len();
    let all_dots = matches!(segment, "." | "..");
    for (at, c) in segment.char_indices() {
        let at_an_end = at < start || at >= end;
        if at_an_end || all_dots || matches!(c, '/' | '%') || c.is_control() {
            let mut bytes = [0; 4];
            for byte in c.encode_utf8(&mut bytes).bytes() {
                // Writing to a string cannot fail.
                let _ = write!(text, "%{byte:02X}");
            }
        } else {
            text.push(c);
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

impl TryFrom<&String> for Name {
    type Error = Error;

    fn try_from(text: &String) -> Result<Self> {
        text.parse()
    }
}

impl From<&Name> for Name {
    fn from(name: &Name) -> Self {
        name.clone()
    }
}

impl<S: AsRef<str>> TryFrom<&[S]> for Name {
    type Error = Error;

    fn try_from(segments: &[S]) -> Result<Self> {
        Self::from_segments(segments)
    }
}

impl<S: AsRef<str>, const N: usize> TryFrom<[S; N]> for Name {
    type Error = Error;

    fn try_from(segments: [S; N]) -> Result<Self> {
        Self::from_segments(&segments)
    }
}

impl<S: AsRef<str>, const N: usize> TryFrom<&[S; N]> for Name {
    type Error = Error;

    fn try_from(segments: &[S; N]) -> Result<Self> {
        Self::from_segments(segments)
    }
}

impl<S: AsRef<str>> TryFrom<Vec<S>> for Name {
    type Error = Error;

    fn try_from(segments: Vec<S>) -> Result<Self> {
        Self::from_segments(&segments)
    }
}

impl AsRef<str> for Name {
    fn as_ref(&self) -> &str {
        self.as_str()
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

/// What a claim shows of itself: its process, and a text of the user's.
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
    use proptest::prelude::*;

    use super::*;
    use crate::url::percent_decode;

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
    fn a_segment_cannot_add_another_one() {
        for (segments, text) in [
            (&["orders", "42"][..], "orders/42"),
            (&["orders", "4/2"], "orders/4%2F2"),
            (&["a%2Fb"], "a%252Fb"),
            (&["..", "."], "%2E%2E/%2E"),
            (&["...", "a.b"], ".../a.b"),
            (&[" a b "], "%20a b%20"),
            (&["  "], "%20%20"),
            (&["x\u{2003}"], "x%E2%80%83"),
            (&["a\nb", "größe"], "a%0Ab/größe"),
        ] {
            let name = Name::try_from(segments).unwrap();
            assert_eq!(name.as_str(), text, "{segments:?}");
            assert_eq!(Name::try_from(segments.to_vec()).unwrap(), name);
        }
    }

    #[test]
    fn no_segments_and_empty_segments_are_refused() {
        let none: [&str; 0] = [];
        assert!(Name::try_from(none).unwrap_err().to_string().contains("empty"));
        let error = Name::try_from(["orders", ""]).unwrap_err().to_string();
        assert!(error.contains("segment 2 is empty"), "{error}");
        assert!(Name::try_from(["x".repeat(300)]).is_err());
    }

    #[test]
    fn notes_are_bounded() {
        assert!(Note::new(&"é".repeat(600)).is_err());
        assert!(Note::new("line\nbreak").is_err());
        assert!(Note::new("nightly backup").unwrap().by.contains('@'));
    }

    proptest! {
        #[test]
        fn any_text_is_a_name_or_rejected(text in "\\PC{0,300}|[a./ \\n\\u{85}]{0,12}") {
            match text.parse::<Name>() {
                Ok(name) => {
                    prop_assert_eq!(name.as_str(), &text);
                    prop_assert!(text.len() <= Name::MAX_LEN && !text.contains(char::is_control));
                    prop_assert!(text.split('/').all(|part| !["", ".", ".."].contains(&part)));
                }
                Err(error) => prop_assert!(error.to_string().len() < 1024),
            }
            let _ = (text.parse::<Prefix>(), Note::new(&text));
        }

        #[test]
        fn segments_can_be_read_back(
            segments in prop::collection::vec("\\PC{1,8}|[./% \\n\\u{85}2E]{1,4}", 1..5),
        ) {
            let Ok(name) = Name::try_from(&segments[..]) else { return Ok(()) };
            let read: Vec<_> = name.as_str().split('/').map(percent_decode).collect();
            prop_assert_eq!(read, segments.into_iter().map(Some).collect::<Vec<_>>());
        }
    }
}
