//! A connection in between that loses answers, holds requests back, or breaks.

use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::{Arc, Condvar, Mutex, mpsc};
use std::time::Duration;

/// Stands between clients and a server.
#[derive(Debug)]
pub struct Proxy {
    port: u16,
    desk: Arc<Desk>,
}

#[derive(Debug, Default)]
struct Desk {
    rules: Mutex<Rules>,
    changed: Condvar,
}

/// Rules hold for the connections that were there when they were made.
#[derive(Debug, Default)]
struct Rules {
    /// Where new connections lead.
    server: u16,
    connections: Vec<TcpStream>,
    held_below: usize,
    deaf_below: usize,
    refuse: bool,
    /// Nothing passes in either direction, on no connection, also of those to come.
    silent: bool,
    /// The only one whose requests are held back, whatever its place.
    only: Option<usize>,
    seen: Seen,
}

impl Rules {
    fn hold(&self, number: usize) -> bool {
        self.silent || number < self.held_below || self.only == Some(number)
    }
}

/// How many parts of requests and answers met a rule.
#[derive(Clone, Copy, Debug, Default)]
pub struct Seen {
    /// Requests held back.
    pub held: usize,
    /// Answers lost.
    pub swallowed: usize,
    /// Requests that came late.
    pub late: usize,
}

impl Proxy {
    /// Stands before the server on this port.
    pub fn before(server: u16) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let (port, desk) = (listener.local_addr().unwrap().port(), Arc::<Desk>::default());
        let (its_desk, proxy) = (desk.clone(), Self { port, desk });
        proxy.lead_to(server);
        std::thread::spawn(move || {
            for client in listener.incoming() {
                let server = its_desk.rules.lock().unwrap().server;
                its_desk.join(client.unwrap(), server);
            }
        });
        proxy
    }

    /// From now on new connections lead to the server on this port.
    pub fn lead_to(&self, server: u16) {
        self.desk.rules.lock().unwrap().server = server;
    }

    /// The port that leads through it.
    pub fn port(&self) -> u16 {
        self.port
    }

    /// From now on answers are lost.
    pub fn swallow_answers(&self) {
        self.desk.change(|rules| rules.deaf_below = rules.connections.len());
    }

    /// From now on requests are held back.
    pub fn hold_requests(&self) {
        self.desk.change(|rules| rules.held_below = rules.connections.len());
    }

    /// New connections are refused, or not.
    pub fn refuse(&self, refuse: bool) {
        self.desk.change(|rules| rules.refuse = refuse);
    }

    /// Nothing passes any more, as if the line were half open; or what was kept passes on.
    pub fn silence(&self, silent: bool) {
        self.desk.change(|rules| rules.silent = silent);
    }

    /// How many connections there were.
    pub fn connections(&self) -> usize {
        self.desk.rules.lock().unwrap().connections.len()
    }

    /// Holds the requests of this connection back, and of no other.
    pub fn hold_requests_of(&self, number: usize) {
        self.desk.change(|rules| rules.only = Some(number));
    }

    /// Ends all connections for the clients. What was held back may still come to the server.
    pub fn cut(&self) {
        self.desk.change(|rules| {
            for client in &rules.connections {
                let _ = client.shutdown(Shutdown::Both);
            }
        });
    }

    /// What was held back comes to the server, which answers it to nobody.
    pub fn deliver_late(&self) {
        self.desk.change(|rules| rules.deaf_below = rules.held_below);
        let before = self.desk.rules.lock().unwrap().seen.swallowed;
        self.desk.change(|rules| rules.held_below = 0);
        self.until("the late request is answered", |seen| seen.late > 0 && seen.swallowed > before);
    }

    /// What was held back comes to the server, which may not listen there any more.
    pub fn let_pass(&self) {
        self.desk.change(|rules| rules.held_below = 0);
    }

    /// Waits until that was seen.
    pub fn until(&self, what: &str, happened: impl Fn(Seen) -> bool) {
        let patience = Duration::from_secs(10);
        tokio::task::block_in_place(|| {
            let rules = self.desk.rules.lock().unwrap();
            let not_yet = |rules: &mut Rules| !happened(rules.seen);
            let waited = self.desk.changed.wait_timeout_while(rules, patience, not_yet);
            assert!(!waited.unwrap().1.timed_out(), "it did not happen: {what}");
        });
    }
}

impl Desk {
    fn change(&self, change: impl FnOnce(&mut Rules)) {
        change(&mut self.rules.lock().unwrap());
        self.changed.notify_all();
    }

    fn join(self: &Arc<Self>, client: TcpStream, server: u16) {
        let mut rules = self.rules.lock().unwrap();
        if rules.refuse {
            return;
        }
        let number = rules.connections.len();
        rules.connections.push(client.try_clone().unwrap());
        drop(rules);
        // A server that is down is not reached through us either.
        let Ok(server) = TcpStream::connect(("127.0.0.1", server)) else {
            let _ = client.shutdown(Shutdown::Both);
            return;
        };
        let (tell, requests) = mpsc::channel();
        let reads = client.try_clone().unwrap();
        let (holds, to_server) = (self.clone(), server.try_clone().unwrap());
        let answers = self.clone();
        std::thread::spawn(move || read_all(reads, |part| tell.send(part).unwrap()));
        std::thread::spawn(move || holds.pass_requests(number, &requests, to_server));
        std::thread::spawn(move || {
            read_all(server, |part| answers.pass_answer(number, &part, &client));
            let _ = client.shutdown(Shutdown::Both);
        });
    }

    fn pass_requests(
        &self,
        number: usize,
        requests: &mpsc::Receiver<Vec<u8>>,
        mut server: TcpStream,
    ) {
        let mut is_late = false;
        while let Ok(part) = requests.recv() {
            let mut rules = self.rules.lock().unwrap();
            if rules.hold(number) {
                rules.seen.held += 1;
                self.changed.notify_all();
                rules = self.changed.wait_while(rules, |rules| rules.hold(number)).unwrap();
                rules.seen.late += 1;
                is_late = true;
                self.changed.notify_all();
            }
            drop(rules);
            let _ = server.write_all(&part);
        }
        // A server may drop what it has not begun when it sees the end of a connection, and what
        // comes late is to be carried out.
        if !is_late {
            let _ = server.shutdown(Shutdown::Write);
        }
    }

    fn pass_answer(&self, number: usize, part: &[u8], mut client: &TcpStream) {
        let rules = self.rules.lock().unwrap();
        let mut rules = self.changed.wait_while(rules, |rules| rules.silent).unwrap();
        if number < rules.deaf_below {
            rules.seen.swallowed += 1;
            self.changed.notify_all();
        } else {
            let _ = client.write_all(part);
        }
    }
}

fn read_all(mut from: TcpStream, mut take: impl FnMut(Vec<u8>)) {
    let mut buffer = [0; 4096];
    while let Ok(length @ 1..) = from.read(&mut buffer) {
        take(buffer[..length].to_vec());
    }
}
