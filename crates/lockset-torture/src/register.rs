//! The data that the locks protect: sets and counters, in the process of the harness.
//!
//! They are behind a socket, so that clients in any language can use them, and in a process that no
//! fault strikes, so that a lost write is the fault of the lock. A request is a line of words
//! separated by spaces, and so is a reply:
//!
//! ```text
//! read  <register> <lock> <token or ->                               ok <snapshot> <counter>
//! write <register> <lock> <token or -> <snapshot> <counter> <value>  ok
//! ```
//!
//! A write replaces the whole set by the one that was read, the snapshot, with one value more, and
//! the counter by the given one: what a client does that reads a file, works, and writes it back.
//! The set itself does not travel.
//!
//! A fenced register also takes the token when it is read. A fence at the write alone is not
//! enough here: if a late holder wrote after its successor has read, its write would be
//! acknowledged and then overwritten.

use std::collections::HashMap;
use std::io::{BufRead, BufReader, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::{Arc, Mutex};

use lockset::fence::{FencingToken, MemoryFence};
use lockset::{Name, Token};

use crate::history::{Register, What};

/// The registers of all locks.
#[derive(Debug)]
pub struct Registers {
    port: u16,
    shared: Arc<Shared>,
}

#[derive(Debug, Default)]
struct Shared {
    fence: MemoryFence,
    data: Mutex<Data>,
}

/// Every version of every register is kept: a snapshot is its number.
#[derive(Debug, Default)]
struct Data {
    versions: Vec<Version>,
    current: HashMap<(Register, String), usize>,
}

#[derive(Debug)]
struct Version {
    /// The version that was read; `None` for the first one, which is empty.
    base: Option<usize>,
    value: String,
    counter: u64,
}

impl Registers {
    /// Serves registers on a free port.
    ///
    /// # Errors
    /// If there is no port.
    pub fn serve() -> std::io::Result<Self> {
        let listener = TcpListener::bind("127.0.0.1:0")?;
        let (port, shared) = (listener.local_addr()?.port(), Arc::<Shared>::default());
        let its_shared = shared.clone();
        std::thread::spawn(move || {
            for client in listener.incoming().flatten() {
                let shared = its_shared.clone();
                std::thread::spawn(move || shared.serve(&client));
            }
        });
        Ok(Self { port, shared })
    }

    /// The port.
    pub fn port(&self) -> u16 {
        self.port
    }

    /// What all registers contain.
    pub fn contents(&self) -> Vec<What> {
        let data = self.shared.data.lock().unwrap();
        let mut contents = Vec::new();
        for ((register, name), &current) in &data.current {
            let mut values = Vec::new();
            let mut place = current;
            while let Some(base) = data.versions[place].base {
                values.push(data.versions[place].value.clone());
                place = base;
            }
            values.reverse();
            let (name, counter) = (name.clone(), data.versions[current].counter);
            contents.push(What::Final { name, register: *register, values, counter });
        }
        contents
    }
}

impl Shared {
    fn serve(&self, client: &TcpStream) {
        let _ = client.set_nodelay(true);
        let mut replies = client;
        for line in BufReader::new(client).lines().map_while(Result::ok) {
            let reply = self.answer(&line).unwrap_or_else(|| format!("invalid {line}"));
            if replies.write_all(format!("{reply}\n").as_bytes()).is_err() {
                return;
            }
        }
    }

    fn answer(&self, line: &str) -> Option<String> {
        let words: Vec<&str> = line.split(' ').collect();
        let [verb, register, name, token, ..] = words[..] else { return None };
        let register: Register = serde_json::from_value(register.into()).ok()?;
        match (verb, &words[4..]) {
            ("read", []) => self.guarded(register, name, token, |data| {
                let current = data.current(register, name);
                format!("ok {current} {}", data.versions[current].counter)
            }),
            ("write", [snapshot, counter, value]) => {
                let (snapshot, counter) = (snapshot.parse().ok()?, counter.parse().ok()?);
                self.guarded(register, name, token, |data| {
                    data.replace(register, name, snapshot, counter, value);
                    "ok".to_owned()
                })
            }
            _ => None,
        }
    }

    fn guarded(
        &self,
        register: Register,
        name: &str,
        token: &str,
        act: impl FnOnce(&mut Data) -> String,
    ) -> Option<String> {
        let act = || act(&mut self.data.lock().unwrap());
        if register != Register::Fenced {
            return Some(act());
        }
        let lock: Name = name.parse().ok()?;
        let token = FencingToken::new(name, Token::new(token.parse().ok()?)).ok()?;
        let admitted = self.fence.write(&lock, &lock, token, act);
        Some(admitted.unwrap_or_else(|_| "rejected".to_owned()))
    }
}

impl Data {
    fn current(&mut self, register: Register, name: &str) -> usize {
        let next = self.versions.len();
        let current = *self.current.entry((register, name.to_owned())).or_insert(next);
        if current == next {
            self.versions.push(Version { base: None, value: String::new(), counter: 0 });
        }
        current
    }

    fn replace(
        &mut self,
        register: Register,
        name: &str,
        snapshot: usize,
        counter: u64,
        value: &str,
    ) {
        self.current(register, name);
        self.current.insert((register, name.to_owned()), self.versions.len());
        self.versions.push(Version { base: Some(snapshot), value: value.to_owned(), counter });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn values(shared: Shared, register: Register) -> Vec<String> {
        let registers = Registers { port: 0, shared: Arc::new(shared) };
        let found = registers.contents().into_iter().find_map(|what| match what {
            What::Final { register: of, values, .. } if of == register => Some(values),
            _ => None,
        });
        found.unwrap_or_default()
    }

    #[track_caller]
    fn expect(shared: &Shared, request: &str, reply: &str) {
        assert_eq!(shared.answer(request).as_deref(), Some(reply), "{request}");
    }

    #[test]
    fn a_write_on_an_old_snapshot_loses_the_writes_since() {
        let shared = Shared::default();
        expect(&shared, "read plain m -", "ok 0 0");
        expect(&shared, "write plain m - 0 1 a", "ok");
        expect(&shared, "read plain m -", "ok 1 1");
        expect(&shared, "write plain m - 1 2 b", "ok");
        expect(&shared, "write plain m - 1 2 c", "ok");
        assert_eq!(values(shared, Register::Plain), ["a", "c"]);
    }

    #[test]
    fn a_fenced_register_rejects_an_old_token() {
        let shared = Shared::default();
        expect(&shared, "read fenced m 5", "ok 0 0");
        expect(&shared, "read fenced m 6", "ok 0 0");
        expect(&shared, "write fenced m 5 0 1 a", "rejected");
        expect(&shared, "write fenced m 6 0 1 b", "ok");
        expect(&shared, "read fenced m 5", "rejected");
        assert_eq!(values(shared, Register::Fenced), ["b"]);
    }

    #[test]
    fn other_requests_are_refused() {
        let shared = Shared::default();
        for request in ["", "read", "read other m -", "read fenced m -", "write plain m - 0 1"] {
            assert_eq!(shared.answer(request), None, "{request}");
        }
    }
}
