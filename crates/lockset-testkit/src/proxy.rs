//! A TCP proxy that drops replies, holds requests back, delays or repeats them, or closes
//! connections.

use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::{Arc, Condvar, Mutex, mpsc};
use std::time::Duration;

/// A proxy between clients and a server.
#[derive(Debug)]
pub struct Proxy {
    port: u16,
    shared: Arc<ProxyShared>,
}

#[derive(Debug, Default)]
struct ProxyShared {
    rules: Mutex<Rules>,
    changed: Condvar,
}

/// A rule applies to the connections that were open when it was set.
#[derive(Debug, Default)]
struct Rules {
    /// The port to which new connections are forwarded.
    server: u16,
    connections: Vec<TcpStream>,
    requests_held_below: usize,
    replies_dropped_below: usize,
    refuse: bool,
    /// Nothing passes in either direction, on existing and future connections.
    silent: bool,
    /// A single connection whose requests are held back.
    only: Option<usize>,
    /// How long every request and every reply is on its way.
    delay: Duration,
    /// After which time each request is executed once more, on a connection of its own.
    repeat: Option<Duration>,
    counts: ProxyCounts,
}

impl Rules {
    fn hold(&self, number: usize) -> bool {
        self.silent || number < self.requests_held_below || self.only == Some(number)
    }
}

/// How many chunks of requests and replies a rule was applied to.
#[derive(Clone, Copy, Debug, Default)]
pub struct ProxyCounts {
    /// Requests held back.
    pub held: usize,
    /// Replies dropped.
    pub dropped: usize,
    /// Requests delivered late.
    pub late: usize,
    /// Requests delivered twice.
    pub repeated: usize,
}

impl Proxy {
    /// A proxy in front of the server on this port.
    pub fn before(server: u16) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let (port, shared) = (listener.local_addr().unwrap().port(), Arc::<ProxyShared>::default());
        let (its_shared, proxy) = (shared.clone(), Self { port, shared });
        proxy.set_server(server);
        std::thread::spawn(move || {
            for client in listener.incoming() {
                let server = its_shared.rules.lock().unwrap().server;
                its_shared.join(client.unwrap(), server);
            }
        });
        proxy
    }

    /// Forwards new connections to the server on this port.
    pub fn set_server(&self, server: u16) {
        self.shared.rules.lock().unwrap().server = server;
    }

    /// The port on which the proxy listens.
    pub fn port(&self) -> u16 {
        self.port
    }

    /// Drops replies from now on.
    pub fn drop_replies(&self) {
        self.shared.change(|rules| rules.replies_dropped_below = rules.connections.len());
    }

    /// Holds requests back from now on.
    pub fn hold_requests(&self) {
        self.shared.change(|rules| rules.requests_held_below = rules.connections.len());
    }

    /// Refuses new connections, or accepts them again.
    pub fn refuse(&self, refuse: bool) {
        self.shared.change(|rules| rules.refuse = refuse);
    }

    /// Forwards nothing, like a half-open connection; or forwards again what was held back.
    pub fn set_silent(&self, silent: bool) {
        self.shared.change(|rules| rules.silent = silent);
    }

    /// Delays every request and every reply from now on.
    pub fn set_delay(&self, delay: Duration) {
        self.shared.change(|rules| rules.delay = delay);
    }

    /// Delivers every request twice, the second time so much later and on another connection, as a
    /// client that repeats it would. Its reply is dropped. Only for protocols whose requests do not
    /// depend on earlier ones of their connection.
    pub fn set_repeat(&self, repeat: Option<Duration>) {
        self.shared.change(|rules| rules.repeat = repeat);
    }

    /// How many connections were accepted so far.
    pub fn connections(&self) -> usize {
        self.shared.rules.lock().unwrap().connections.len()
    }

    /// Holds back the requests of this connection only.
    pub fn hold_requests_of(&self, number: usize) {
        self.shared.change(|rules| rules.only = Some(number));
    }

    /// Closes all client connections. Requests that were held back may still reach the server.
    pub fn cut(&self) {
        self.shared.change(|rules| {
            for client in &rules.connections {
                let _ = client.shutdown(Shutdown::Both);
            }
        });
    }

    /// Delivers the held requests to the server and drops its replies.
    pub fn deliver_late(&self) {
        self.shared.change(|rules| rules.replies_dropped_below = rules.requests_held_below);
        let before = self.shared.rules.lock().unwrap().counts.dropped;
        self.shared.change(|rules| rules.requests_held_below = 0);
        self.until("the late request is answered", |counts| {
            counts.late > 0 && counts.dropped > before
        });
    }

    /// Delivers the held requests to the server, which may have closed the connection.
    pub fn release_requests(&self) {
        self.shared.change(|rules| rules.requests_held_below = 0);
    }

    /// Waits until the counts satisfy `happened`.
    pub fn until(&self, what: &str, happened: impl Fn(ProxyCounts) -> bool) {
        let patience = Duration::from_secs(10);
        tokio::task::block_in_place(|| {
            let rules = self.shared.rules.lock().unwrap();
            let not_yet = |rules: &mut Rules| !happened(rules.counts);
            let waited = self.shared.changed.wait_timeout_while(rules, patience, not_yet);
            assert!(!waited.unwrap().1.timed_out(), "it did not happen: {what}");
        });
    }
}

impl ProxyShared {
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
        // A server that is down is not reachable through the proxy either.
        let Ok(server) = TcpStream::connect(("127.0.0.1", server)) else {
            let _ = client.shutdown(Shutdown::Both);
            return;
        };
        let (tell, requests) = mpsc::channel();
        let reads = client.try_clone().unwrap();
        let (holds, to_server) = (self.clone(), server.try_clone().unwrap());
        let answers = self.clone();
        std::thread::spawn(move || read_all(reads, |part| tell.send(part).unwrap()));
        std::thread::spawn(move || holds.forward_requests(number, &requests, to_server));
        std::thread::spawn(move || {
            read_all(server, |part| answers.forward_reply(number, &part, &client));
            let _ = client.shutdown(Shutdown::Both);
        });
    }

    fn forward_requests(
        &self,
        number: usize,
        requests: &mpsc::Receiver<Vec<u8>>,
        mut server: TcpStream,
    ) {
        let mut is_late = false;
        while let Ok(part) = requests.recv() {
            let mut rules = self.rules.lock().unwrap();
            if rules.hold(number) {
                rules.counts.held += 1;
                self.changed.notify_all();
                rules = self.changed.wait_while(rules, |rules| rules.hold(number)).unwrap();
                rules.counts.late += 1;
                is_late = true;
                self.changed.notify_all();
            }
            let (delay, repeat, port) = (rules.delay, rules.repeat, rules.server);
            rules.counts.repeated += usize::from(repeat.is_some());
            drop(rules);
            std::thread::sleep(delay);
            let _ = server.write_all(&part);
            if let Some(later) = repeat {
                std::thread::spawn(move || repeat_request(port, &part, later));
            }
        }
        // A server may discard pending requests when it sees the end of a connection, but late
        // requests must be executed.
        if !is_late {
            let _ = server.shutdown(Shutdown::Write);
        }
    }

    fn forward_reply(&self, number: usize, part: &[u8], mut client: &TcpStream) {
        let delay = self.rules.lock().unwrap().delay;
        std::thread::sleep(delay);
        let rules = self.rules.lock().unwrap();
        let mut rules = self.changed.wait_while(rules, |rules| rules.silent).unwrap();
        if number < rules.replies_dropped_below {
            rules.counts.dropped += 1;
            self.changed.notify_all();
        } else {
            let _ = client.write_all(part);
        }
    }
}

fn repeat_request(server: u16, part: &[u8], later: Duration) {
    std::thread::sleep(later);
    let Ok(mut server) = TcpStream::connect(("127.0.0.1", server)) else { return };
    let _ = server.set_read_timeout(Some(Duration::from_secs(1)));
    let _ = server.write_all(part);
    // The request is executed when its reply begins.
    let _ = server.read(&mut [0; 64]);
}

fn read_all(mut from: TcpStream, mut take: impl FnMut(Vec<u8>)) {
    let mut buffer = [0; 4096];
    while let Ok(length @ 1..) = from.read(&mut buffer) {
        take(buffer[..length].to_vec());
    }
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use super::*;

    /// A server that replies with what it received, and the requests that it received.
    fn echo() -> (u16, mpsc::Receiver<Vec<u8>>) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        let (tell, requests) = mpsc::channel();
        std::thread::spawn(move || {
            for client in listener.incoming() {
                let (client, tell) = (client.unwrap(), tell.clone());
                std::thread::spawn(move || {
                    read_all(client.try_clone().unwrap(), |part| {
                        let _ = (&client).write_all(&part);
                        let _ = tell.send(part);
                    });
                });
            }
        });
        (port, requests)
    }

    fn ask(proxy: &Proxy, request: &[u8]) -> Vec<u8> {
        let mut stream = TcpStream::connect(("127.0.0.1", proxy.port())).unwrap();
        stream.write_all(request).unwrap();
        let mut reply = vec![0; request.len()];
        stream.read_exact(&mut reply).unwrap();
        reply
    }

    #[test]
    fn a_repeated_request_is_delivered_twice() {
        let (port, requests) = echo();
        let proxy = Proxy::before(port);
        assert_eq!(ask(&proxy, b"once"), b"once");
        proxy.set_repeat(Some(Duration::from_millis(50)));
        assert_eq!(ask(&proxy, b"twice"), b"twice");
        let patience = Duration::from_secs(30);
        let received: Vec<_> = (0..3).map(|_| requests.recv_timeout(patience).unwrap()).collect();
        assert_eq!(received, [&b"once"[..], b"twice", b"twice"]);
    }

    #[test]
    fn a_delay_is_paid_in_both_directions() {
        let (port, _requests) = echo();
        let proxy = Proxy::before(port);
        proxy.set_delay(Duration::from_millis(100));
        let began = Instant::now();
        assert_eq!(ask(&proxy, b"slow"), b"slow");
        assert!(began.elapsed() >= Duration::from_millis(200), "{:?}", began.elapsed());
    }
}
