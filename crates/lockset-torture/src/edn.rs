//! A history in Jepsen's format: one map per line, in EDN.
//!
//! A process of Jepsen does one thing at a time. So each acquisition of a client process gets the
//! lowest number that is free there; a number whose operation never ended is not used again.

use std::collections::HashMap;
use std::fmt::Write;

use crate::history::{History, Outcome, What};

/// The history as EDN.
pub fn edn(history: &History) -> String {
    let mut text = String::new();
    let mut processes = Processes::default();
    for (index, event) in history.events.iter().enumerate() {
        let Some((kind, f, value, op, is_last)) = operation(&event.what) else { continue };
        let process = match op {
            None => ":nemesis".to_owned(),
            Some(op) => processes.number(&event.by, op).to_string(),
        };
        if let (Some(op), true) = (op, is_last) {
            processes.end(&event.by, op);
        }
        let time = event.at;
        writeln!(
            text,
            "{{:type {kind}, :f {f}, :value {value}, :process {process}, :time {time}, :index {index}}}",
        )
        .unwrap();
    }
    text
}

/// Type, function, value, operation (`None`: of the nemesis), and whether it ends the operation.
type Operation = (&'static str, String, String, Option<u64>, bool);

fn operation(what: &What) -> Option<Operation> {
    let name = |name: &str| format!("{name:?}");
    Some(match what {
        What::Ask { op, name: lock, .. } => {
            (":invoke", ":acquire".to_owned(), name(lock), Some(*op), false)
        }
        What::Enter { op, token, .. } => {
            let token = token.map_or("nil".to_owned(), |token| token.to_string());
            (":ok", ":acquire".to_owned(), token, Some(*op), false)
        }
        // Whether a failed acquisition left something behind is not known.
        What::Failed { op, error } => {
            (":info", ":acquire".to_owned(), name(error), Some(*op), true)
        }
        What::Exit { op } => (":invoke", ":release".to_owned(), "nil".to_owned(), Some(*op), false),
        What::Released { op, error: None } => {
            (":ok", ":release".to_owned(), "nil".to_owned(), Some(*op), true)
        }
        What::Released { op, error: Some(error) } => {
            (":info", ":release".to_owned(), name(error), Some(*op), true)
        }
        What::Write { op, register, value } => {
            (":invoke", format!(":add-{register:?}").to_lowercase(), name(value), Some(*op), false)
        }
        What::Wrote { op, register, value, outcome } => {
            let kind = match outcome {
                Outcome::Acknowledged => ":ok",
                Outcome::Rejected => ":fail",
                Outcome::Unknown => ":info",
            };
            (kind, format!(":add-{register:?}").to_lowercase(), name(value), Some(*op), false)
        }
        What::FaultBegins { fault, target, .. } => {
            (":info", format!(":begin-{fault}"), name(target), None, false)
        }
        What::FaultEnds { number } => {
            (":info", ":end-fault".to_owned(), number.to_string(), None, false)
        }
        What::Final { name: lock, register, values, .. } => {
            let values: Vec<String> = values.iter().map(|value| format!("{value:?}")).collect();
            let value = format!("[{lock:?} #{{{}}}]", values.join(" "));
            (":info", format!(":read-{register:?}").to_lowercase(), value, None, false)
        }
        _ => return None,
    })
}

#[derive(Debug, Default)]
struct Processes {
    busy: HashMap<(String, u64), usize>,
    free: HashMap<String, Vec<usize>>,
    next: usize,
}

impl Processes {
    fn number(&mut self, by: &str, op: u64) -> usize {
        if let Some(number) = self.busy.get(&(by.to_owned(), op)) {
            return *number;
        }
        let free = self.free.entry(by.to_owned()).or_default().pop();
        let number = free.unwrap_or_else(|| {
            self.next += 1;
            self.next - 1
        });
        self.busy.insert((by.to_owned(), op), number);
        number
    }

    fn end(&mut self, by: &str, op: u64) {
        if let Some(number) = self.busy.remove(&(by.to_owned(), op)) {
            self.free.entry(by.to_owned()).or_default().push(number);
        }
    }
}

#[cfg(test)]
mod tests {
    use lockset::Mode;

    use super::*;
    use crate::history::Event;

    #[test]
    fn operations_of_one_process_do_not_overlap() {
        let event = |at, what| Event { at, by: "c0.1".to_owned(), what };
        let ask = |op| What::Ask { op, name: "m".to_owned(), mode: Mode::Exclusive };
        let enter = |op| What::Enter { op, token: Some(op), valid_until: None };
        let history = History::new(vec![
            event(1, ask(1)),
            event(2, ask(2)),
            event(3, enter(1)),
            event(4, What::Exit { op: 1 }),
            event(5, What::Released { op: 1, error: None }),
            event(6, ask(3)),
        ]);
        let text = edn(&history);
        let lines: Vec<&str> = text.lines().collect();
        let first = "{:type :invoke, :f :acquire, :value \"m\", :process 0, :time 1, :index 0}";
        assert_eq!(lines[0], first);
        assert!(lines[1].contains(":process 1"), "{text}");
        assert!(lines[2].contains(":type :ok, :f :acquire, :value 1, :process 0"), "{text}");
        assert!(lines[5].contains(":process 0"), "the number is free again: {text}");
    }
}
