//! Everything lockset prints: failures on stderr, data on stdout, colour only on a terminal.

use std::fmt::Display;
use std::io::{self, IsTerminal, Write};
use std::time::Duration;

use lockset::fence::FenceMark;
use lockset::{Error, Holder, LockState, Name, Token};
use serde::Serialize;

/// The exit codes that are lockset's own.
pub(crate) mod code {
    /// `show` and `break`: no client holds the lock.
    pub(crate) const NOT_HELD: u8 = 1;
    pub(crate) const BUSY: u8 = 75;
    pub(crate) const LOST: u8 = 76;
    /// `fence`: the resource has seen a greater token.
    pub(crate) const STALE: u8 = 77;
    pub(crate) const TIMEOUT: u8 = 124;
    pub(crate) const OWN_ERROR: u8 = 125;
    pub(crate) const CANNOT_EXECUTE: u8 = 126;
    pub(crate) const NOT_FOUND: u8 = 127;
}

/// Why lockset fails: one line, a second one with the next step if there is one, and the exit code.
#[derive(Debug)]
pub(crate) struct Failure {
    pub(crate) code: u8,
    message: String,
    hint: Option<String>,
}

impl Failure {
    pub(crate) fn new(code: u8, message: impl Into<String>) -> Self {
        Self { code, message: message.into(), hint: None }
    }

    pub(crate) fn own(message: impl Into<String>) -> Self {
        Self::new(code::OWN_ERROR, message)
    }

    pub(crate) fn hint(mut self, hint: impl Into<String>) -> Self {
        self.hint = Some(hint.into());
        self
    }

    /// An exit code without a message: after a signal, or when a reader went away.
    pub(crate) fn silent(code: u8) -> Self {
        Self::new(code, "")
    }

    /// The same after `redact` removed what must not be shown.
    pub(crate) fn redacted(mut self, redact: impl Fn(&str) -> String) -> Self {
        self.message = redact(&self.message);
        self.hint = self.hint.as_deref().map(redact);
        self
    }

    pub(crate) fn message(&self) -> &str {
        &self.message
    }

    /// Prints it on stderr, after `redact` removed what must not be shown.
    pub(crate) fn print(&self, redact: impl Fn(&str) -> String) {
        if self.message.is_empty() {
            return;
        }
        print_message(redact(&self.message));
        if let Some(hint) = &self.hint {
            print_message(format_args!("hint: {}", redact(hint)));
        }
    }
}

impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        let failure = Failure::new(code_of(&error), with_sources(&error));
        match hint_for(&error) {
            Some(hint) => failure.hint(hint),
            None => failure,
        }
    }
}

fn code_of(error: &Error) -> u8 {
    match error {
        Error::Timeout { .. } => code::TIMEOUT,
        Error::Lost { .. } | Error::NotHeld { .. } => code::LOST,
        _ => code::OWN_ERROR,
    }
}

/// The error and its sources, on one line, each once.
pub(crate) fn with_sources(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(error) = source {
        let next = error.to_string();
        if !text.contains(&next) {
            text = format!("{text}: {next}");
        }
        source = error.source();
    }
    harmless(&text.replace('\n', " "))
}

fn hint_for(error: &Error) -> Option<String> {
    match error {
        Error::Timeout { name, .. } => {
            Some(format!("`lockset show {name}` shows who is before you"))
        }
        Error::Conflict { name, .. } => {
            Some(format!("`lockset show {name}` shows how it is used; agree on one use per name"))
        }
        Error::Unsupported { .. } => Some("choose another engine with -u URL".into()),
        Error::Unreachable { retryable: true, .. } => {
            Some("this may pass by itself; try again".into())
        }
        _ => None,
    }
}

/// Prints one line on stderr. A failure to print is ignored.
pub(crate) fn print_message(message: impl Display) {
    let _ = writeln!(io::stderr(), "lockset: {message}");
}

/// A change of leadership, on stderr: stdout belongs to the command.
pub(crate) fn announce(name: &Name, token: Token, leads: bool) {
    let event = serde_json::json!({ "name": name, "token": token, "leads": leads });
    let _ = writeln!(io::stderr(), "{event}");
}

/// A ttl that differs from the requested one, on stderr.
pub(crate) fn announce_ttl(granted: Duration, asked: Duration) {
    let millis = |span: Duration| span.as_millis() as u64;
    let event = serde_json::json!({ "ttl_ms": millis(granted), "asked_ttl_ms": millis(asked) });
    let _ = writeln!(io::stderr(), "{event}");
}

/// Writes text on stdout.
pub(crate) fn print(text: impl Display) -> Result<(), Failure> {
    let mut out = io::stdout().lock();
    write!(out, "{text}").and_then(|()| out.flush()).map_err(Failure::from)
}

/// Writes a value on stdout as one line of JSON.
pub(crate) fn print_json(value: &impl Serialize) -> Result<(), Failure> {
    let text = serde_json::to_string(value).map_err(|error| Failure::own(error.to_string()))?;
    print(format_args!("{text}\n"))
}

impl From<io::Error> for Failure {
    /// An error of writing to stdout: a reader that went away has what it needs
    /// (`lockset ls | head`).
    fn from(error: io::Error) -> Self {
        match error.kind() {
            io::ErrorKind::BrokenPipe => Failure::silent(0),
            _ => Failure::own(format!("cannot write the output: {error}")),
        }
    }
}

/// Colours, or none.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Paint(bool);

impl Paint {
    pub(crate) fn for_stdout() -> Self {
        let wanted = std::env::var_os("NO_COLOR").is_none_or(|value| value.is_empty());
        Self(wanted && io::stdout().is_terminal())
    }

    fn bold(self, text: &str) -> String {
        self.wrap("1", text)
    }

    fn dim(self, text: &str) -> String {
        self.wrap("2", text)
    }

    fn red(self, text: &str) -> String {
        self.wrap("31", text)
    }

    fn wrap(self, style: &str, text: &str) -> String {
        if self.0 { format!("\x1b[{style}m{text}\x1b[0m") } else { text.to_owned() }
    }
}

/// All locks, one line per holder.
pub(crate) fn table(states: &[LockState], paint: Paint) -> String {
    let header = ["NAME", "HELD BY", "MODE", "TOKEN", "LEFT", "WAITING", "NOTE"].map(String::from);
    let mut rows = vec![header];
    for state in states {
        let waiting = state.waiters.len().to_string();
        if state.holders.is_empty() {
            let blank = ["-"; 4].map(String::from);
            let [by, mode, token, left] = blank;
            rows.push([
                harmless(state.name.as_str()),
                by,
                mode,
                token,
                left,
                waiting,
                String::new(),
            ]);
            continue;
        }
        for holder in &state.holders {
            rows.push(row(state, holder, &waiting));
        }
    }
    aligned(&rows, paint)
}

/// All marks of a fence, one line each.
pub(crate) fn table_of_marks(marks: &[FenceMark], paint: Paint) -> String {
    let mut rows = vec![["RESOURCE", "LOCK", "TOKEN"].map(String::from)];
    rows.extend(marks.iter().map(|mark| {
        let names = [&mark.resource, &mark.lock].map(|name| harmless(name.as_str()));
        let [resource, lock] = names;
        [resource, lock, mark.token.to_string()]
    }));
    aligned(&rows, paint)
}

/// Rows in columns, below the first one as their header.
fn aligned<const COLUMNS: usize>(rows: &[[String; COLUMNS]], paint: Paint) -> String {
    let width = |column: usize| {
        rows.iter().map(|row| row[column].chars().count()).max().unwrap_or_default()
    };
    let widths: Vec<usize> = (0..COLUMNS).map(width).collect();
    let mut text = String::new();
    for (number, row) in rows.iter().enumerate() {
        let cells = row.iter().zip(&widths).map(|(cell, &width)| format!("{cell:width$}"));
        let line = cells.collect::<Vec<_>>().join("  ");
        let line = line.trim_end();
        text += &if number == 0 { paint.dim(line) } else { line.to_owned() };
        text.push('\n');
    }
    text
}

fn row(state: &LockState, holder: &Holder, waiting: &str) -> [String; 7] {
    [
        harmless(state.name.as_str()),
        harmless(by(holder)),
        holder.mode.to_string(),
        holder.token.map_or_else(|| "-".into(), |token| token.to_string()),
        brief(holder.left) + if holder.revoked { " (last)" } else { "" },
        waiting.to_owned(),
        harmless(&holder.note.text),
    ]
}

/// One lock, in full.
pub(crate) fn description(state: &LockState, paint: Paint) -> String {
    let mut text = paint.bold(&harmless(state.name.as_str()));
    if state.holders.is_empty() {
        text += " is free";
        if let Some(fence) = state.fence {
            text += &format!("; its last token was {fence}");
        }
        text.push('\n');
    } else {
        text += " is held\n";
    }
    for holder in &state.holders {
        text += &format!("  by {}, {}", by_with_note(holder), holder.mode);
        if let Some(token) = holder.token {
            text += &format!(", token {token}");
        }
        text += &format!(", lease {} more", brief(holder.left));
        if holder.revoked {
            text += &paint.red(", asked back: this lease is its last");
        }
        text.push('\n');
    }
    for (place, waiter) in state.waiters.iter().enumerate() {
        let note = &waiter.note;
        let who = who(&note.by, &note.text);
        text += &format!("  waiting, place {}: {who}, {}\n", place + 1, waiter.mode);
    }
    text
}

/// One lock, on one line.
pub(crate) fn line(state: &LockState, paint: Paint) -> String {
    let mut text = paint.bold(&harmless(state.name.as_str()));
    text.push(' ');
    if state.holders.is_empty() {
        text += "free";
    } else {
        let holders: Vec<String> = state.holders.iter().map(line_of_holder).collect();
        text += &format!("held by {}", holders.join("; "));
    }
    if !state.waiters.is_empty() {
        text += &format!(", {} waiting", state.waiters.len());
    }
    text.push('\n');
    text
}

fn line_of_holder(holder: &Holder) -> String {
    let token = holder.token.map_or_else(String::new, |token| format!(", token {token}"));
    let last = if holder.revoked { ", asked back" } else { "" };
    format!("{}, {}{token}{last}", by_with_note(holder), holder.mode)
}

/// A holder for people: `123@host (nightly backup)`.
pub(crate) fn by_with_note(holder: &Holder) -> String {
    who(&holder.note.by, &holder.note.text)
}

fn by(holder: &Holder) -> &str {
    if holder.note.by.is_empty() { "unknown" } else { &holder.note.by }
}

fn who(by: &str, note: &str) -> String {
    let by = if by.is_empty() { "unknown" } else { by };
    harmless(&if note.is_empty() { by.to_owned() } else { format!("{by} ({note})") })
}

/// A text of another client, without what would move the cursor, colour or reorder the screen.
fn harmless(text: &str) -> String {
    let reorders = |c| {
        let marks = ['\u{200e}', '\u{200f}'].contains(&c);
        marks || ('\u{202a}'..='\u{202e}').contains(&c) || ('\u{2066}'..='\u{2069}').contains(&c)
    };
    text.chars().map(|c| if c.is_control() || reorders(c) { '\u{fffd}' } else { c }).collect()
}

/// A span for people: as exact as is of use.
pub(crate) fn brief(span: Duration) -> String {
    if span < Duration::from_secs(10) {
        format!("{:.1}s", span.as_secs_f64())
    } else {
        humantime::format_duration(Duration::from_secs(span.as_secs())).to_string()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_others_write_does_not_move_the_cursor() {
        assert_eq!(who("7@ho\x1b[2Jst", "a\nb"), "7@ho\u{fffd}[2Jst (a\u{fffd}b)");
        assert_eq!(harmless("grün \u{202e}x"), "grün \u{fffd}x");
    }

    #[test]
    fn spans_are_brief() {
        assert_eq!(brief(Duration::from_millis(1234)), "1.2s");
        assert_eq!(brief(Duration::from_millis(75_900)), "1m 15s");
    }
}
