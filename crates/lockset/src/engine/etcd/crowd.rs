//! Transactions that travel together.
//!
//! One that finds nothing under way goes alone, at once. Those that come while it is under way
//! wait for each other and leave as one transaction when it is back: a crowd costs the servers one
//! round of agreement. Never two that meet, because they are of one name or, with raw names, one
//! name lies within the other: what they create would have the same revision, and nobody could
//! tell who was first.

use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use tokio::runtime::Handle;
use tokio::sync::oneshot;

use super::keys::Layout;
use super::link::{Failed, Link, PATIENCE, What};
use super::rpc::{TxnRequest, TxnResponse};
use super::txn::{always, nested, parts};
use crate::mutual::unpoisoned;
use crate::name::Name;

/// At most so many travel together; a server takes 128 operations, those of the parts included.
const MOST: usize = 96;

/// Whoever waits so long for one that went alone does so too: the future that sent it may rest,
/// while its caller is busy with something else.
const LONG: Duration = Duration::from_millis(200);

type Acted = Result<TxnResponse, Failed>;

/// Those who wait for the one under way.
#[derive(Debug)]
pub(super) struct Crowd {
    link: Arc<Link>,
    runtime: Handle,
    layout: Layout,
    line: Mutex<Line>,
}

#[derive(Debug, Default)]
struct Line {
    under_way: bool,
    /// The one under way went alone.
    is_alone: bool,
    waiting: Vec<Waiting>,
    last_number: u64,
}

#[derive(Debug)]
struct Waiting {
    number: u64,
    name: Name,
    txn: TxnRequest,
    tell: oneshot::Sender<Acted>,
}

impl Line {
    /// Those who can leave together now; the others keep their order.
    fn leave(&mut self, layout: &Layout) -> Vec<Waiting> {
        let (mut leaving, mut staying) = (Vec::<Waiting>::new(), Vec::new());
        for waiting in self.waiting.drain(..) {
            // Those who gave up may have left a mark by now, so nothing is sent for them.
            if waiting.tell.is_closed() {
                continue;
            }
            let meets = |other: &Waiting| layout.meet(&other.name, &waiting.name);
            match leaving.len() < MOST && !leaving.iter().any(meets) {
                true => leaving.push(waiting),
                false => staying.push(waiting),
            }
        }
        self.waiting = staying;
        leaving
    }

    fn enter(&mut self, name: &Name, txn: &TxnRequest) -> (u64, oneshot::Receiver<Acted>) {
        let (tell, answer) = oneshot::channel();
        self.last_number += 1;
        let (number, name, txn) = (self.last_number, name.clone(), txn.clone());
        self.waiting.push(Waiting { number, name, txn, tell });
        (number, answer)
    }

    /// Whether the one with this number still waited for one that went alone. Then it does not any
    /// more.
    fn take_out(&mut self, number: u64) -> bool {
        let before = self.waiting.len();
        if self.is_alone {
            self.waiting.retain(|waiting| waiting.number != number);
        }
        self.waiting.len() < before
    }

    /// Where nobody answered, those who wait in line try for themselves how long it is worth to go
    /// on, instead of one silence after the other.
    fn heed(&mut self, failed: &Failed) {
        if failed.what == What::Silent {
            for waiting in self.waiting.drain(..) {
                let _ = waiting.tell.send(Err(failed.unsent_too()));
            }
        }
    }
}

impl Crowd {
    pub(super) fn new(link: Arc<Link>, runtime: Handle, layout: Layout) -> Arc<Self> {
        Arc::new(Self { link, runtime, layout, line: Mutex::default() })
    }

    fn line(&self) -> MutexGuard<'_, Line> {
        unpoisoned(&self.line)
    }

    /// Sends a transaction about a name once, alone or with others.
    pub(super) async fn act(self: &Arc<Self>, name: &Name, txn: TxnRequest) -> Acted {
        let answer = {
            let mut line = self.line();
            match line.under_way {
                true => Some(line.enter(name, &txn)),
                false => {
                    (line.under_way, line.is_alone) = (true, true);
                    None
                }
            }
        };
        let Some((number, mut answer)) = answer else {
            let _turn = Turn { crowd: self };
            let acted = self.link.txn_once(txn, PATIENCE).await;
            if let Err(failed) = &acted {
                self.line().heed(failed);
            }
            return acted;
        };
        let answer = loop {
            match tokio::time::timeout(LONG, &mut answer).await {
                Ok(answer) => break answer,
                Err(_) if self.line().take_out(number) => {
                    return self.link.txn_once(txn, PATIENCE).await;
                }
                Err(_) => {}
            }
        };
        match answer {
            // Perhaps because of another one: alone it is told its own reason.
            Ok(Err(failed)) if !failed.unknown && failed.what != What::Silent => {
                self.link.txn_once(txn, PATIENCE).await
            }
            Ok(acted) => acted,
            Err(_) => {
                let error = super::link::failed("this client was closed".to_owned(), false);
                Err(Failed::unknown(error))
            }
        }
    }
}

/// One who goes alone. Those who came meanwhile leave when it is back, or was given up.
struct Turn<'a> {
    crowd: &'a Arc<Crowd>,
}

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        let mut line = self.crowd.line();
        if line.waiting.is_empty() {
            line.under_way = false;
            return;
        }
        line.is_alone = false;
        drop(line);
        let leading = Leading { crowd: self.crowd.clone(), is_done: false };
        self.crowd.runtime.spawn(lead(leading));
    }
}

/// The one who leads the crowd. If it ends early, because its runtime does, nobody waits in vain.
struct Leading {
    crowd: Arc<Crowd>,
    is_done: bool,
}

impl Drop for Leading {
    fn drop(&mut self) {
        if !self.is_done {
            let mut line = self.crowd.line();
            line.under_way = false;
            line.waiting.clear();
        }
    }
}

/// Sends all who wait, together, until nobody does.
async fn lead(mut leading: Leading) {
    let crowd = leading.crowd.clone();
    loop {
        let group = {
            let mut line = crowd.line();
            if line.waiting.is_empty() {
                line.under_way = false;
                leading.is_done = true;
                return;
            }
            line.leave(&crowd.layout)
        };
        let (txns, tell): (Vec<_>, Vec<_>) =
            group.into_iter().map(|one| (one.txn, one.tell)).unzip();
        if !txns.is_empty() {
            let answers = send(&crowd.link, txns).await;
            if let Err(failed) = &answers {
                crowd.line().heed(failed);
            }
            answer_all(tell, answers);
        }
        // Those who were just answered may have the next one ready at once.
        tokio::task::yield_now().await;
    }
}

async fn send(link: &Link, mut txns: Vec<TxnRequest>) -> Result<Vec<TxnResponse>, Failed> {
    if txns.len() == 1
        && let Some(txn) = txns.pop()
    {
        return link.txn_once(txn, PATIENCE).await.map(|answer| vec![answer]);
    }
    let together = always(txns.into_iter().map(nested).collect());
    link.txn_once(together, PATIENCE).await.map(parts)
}

fn answer_all(tell: Vec<oneshot::Sender<Acted>>, answers: Result<Vec<TxnResponse>, Failed>) {
    match answers {
        Ok(answers) => tell.into_iter().zip(answers).for_each(|(tell, answer)| {
            let _ = tell.send(Ok(answer));
        }),
        Err(failed) => tell.into_iter().for_each(|tell| {
            let _ = tell.send(Err(failed.again()));
        }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn waiting(name: &str) -> (Waiting, oneshot::Receiver<Acted>) {
        let (tell, answer) = oneshot::channel();
        let name = name.parse().unwrap();
        (Waiting { number: 0, name, txn: TxnRequest::default(), tell }, answer)
    }

    /// Who leaves together, until nobody waits. One gave up.
    fn groups(raw: bool, names: &[&str], gave_up: usize) -> Vec<Vec<String>> {
        let (layout, mut line) = (Layout::new("p", raw), Line::default());
        let (waiting, mut answers): (Vec<_>, Vec<_>) =
            names.iter().map(|name| waiting(name)).unzip();
        line.waiting = waiting;
        answers.remove(gave_up);
        let left =
            std::iter::from_fn(|| Some(line.leave(&layout)).filter(|group| !group.is_empty()));
        left.map(|group| group.into_iter().map(|one| one.name.to_string()).collect()).collect()
    }

    #[test]
    fn two_of_one_name_never_travel_together() {
        let names = ["a", "b", "a", "c", "a/b", "a"];
        assert_eq!(groups(false, &names, 1), [&["a", "c", "a/b"][..], &["a"], &["a"]]);
    }

    #[test]
    fn raw_names_within_each_other_never_travel_together() {
        let names = ["a/b", "x", "a", "a/c", "ab", "a/b/c", "a/b"];
        let expected = [&["a/b", "a/c", "ab"][..], &["a"], &["a/b/c"], &["a/b"]];
        assert_eq!(groups(true, &names, 1), expected);
    }
}
