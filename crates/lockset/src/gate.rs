//! The in-process queue before the engine's.
//!
//! Exclusive claims of one process on one name stand in line here, first come first served, so
//! they cost the engine one waiter together, and a release can take the next of them along.

use std::collections::VecDeque;
use std::collections::hash_map::Entry;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};

use tokio::sync::oneshot;

use crate::clock::{Clock, Moment};
use crate::engine::Claim;
use crate::guard::Guard;
use crate::hash::FastMap;
use crate::name::Name;
use crate::options::ResolvedOptions;
use crate::sync;

/// One gate per client.
#[derive(Debug, Default)]
pub(crate) struct Gate {
    /// A name is present while somebody has its pass; the queue holds those behind.
    lines: Mutex<FastMap<Name, VecDeque<InLine>>>,
    closed: AtomicBool,
}

/// Somebody in line.
#[derive(Debug)]
pub(crate) struct InLine {
    pub(crate) claim: Arc<Claim>,
    pub(crate) options: ResolvedOptions,
    turn: oneshot::Sender<Turn>,
    offered: Arc<AtomicBool>,
}

/// What the one who is next in line is told.
#[derive(Debug)]
pub(crate) enum Turn {
    /// Ask the engine yourself.
    Ask(Pass),
    /// The release that went before already got the lock for you.
    Granted(Guard),
}

/// The answer at the gate.
pub(crate) enum Entered {
    /// Nobody of this process is before us.
    Pass(Pass),
    /// In line; the turn will come.
    InLine(Place),
}

/// A place in line.
#[derive(Debug)]
pub(crate) struct Place {
    turn: oneshot::Receiver<Turn>,
    /// Set when the claim goes along with a release: from then on the engine may know it.
    pub(crate) offered: Arc<AtomicBool>,
}

impl Place {
    /// Waits for the turn; `None` if it has not come by `deadline`.
    pub(crate) async fn turn(mut self, clock: &Clock, deadline: Moment) -> Option<Turn> {
        tokio::select! {
            biased;
            turn = &mut self.turn => return turn.ok(),
            () = clock.sleep_until(deadline) => {}
        }
        // It may have come at the last moment.
        self.turn.close();
        self.turn.try_recv().ok()
    }
}

/// The right to talk to the engine about a name on behalf of this process. Dropping it calls the
/// next in line.
#[derive(Debug)]
pub(crate) struct Pass {
    gate: Option<Arc<Gate>>,
    name: Name,
}

impl Gate {
    /// Passes, or stands in line if `queue`.
    pub(crate) fn enter(
        self: &Arc<Self>,
        claim: &Arc<Claim>,
        options: &ResolvedOptions,
        queue: bool,
    ) -> Option<Entered> {
        let mut lines = self.lines();
        if self.closed.load(Ordering::Acquire) {
            return None;
        }
        match lines.entry(claim.name.clone()) {
            Entry::Vacant(line) => {
                line.insert(VecDeque::new());
                Some(Entered::Pass(self.pass(claim.name.clone())))
            }
            Entry::Occupied(_) if !queue => None,
            Entry::Occupied(mut line) => {
                let (turn, receiver) = oneshot::channel();
                let offered = Arc::new(AtomicBool::new(false));
                let place = Place { turn: receiver, offered: offered.clone() };
                let (claim, options) = (claim.clone(), options.clone());
                line.get_mut().push_back(InLine { claim, options, turn, offered });
                Some(Entered::InLine(place))
            }
        }
    }

    /// Sends everybody in line away, and lets nobody in any more.
    pub(crate) fn close(&self) {
        let mut lines = self.lines();
        self.closed.store(true, Ordering::Release);
        let sent_away: Vec<VecDeque<InLine>> = lines.values_mut().map(std::mem::take).collect();
        // What they are told may call back here.
        drop(lines);
        drop(sent_away);
    }

    fn pass(self: &Arc<Self>, name: Name) -> Pass {
        Pass { gate: Some(self.clone()), name }
    }

    /// Calls the next in line who is still there; the name is free if there is none. A loop, not
    /// a recursion through `Pass::drop`: thousands may have left the line.
    fn call_next(self: &Arc<Self>, name: &Name) {
        loop {
            let next = {
                let mut lines = self.lines();
                let next = lines.get_mut(name).and_then(next_present);
                if next.is_none() {
                    lines.remove(name);
                }
                next
            };
            let Some(next) = next else { return };
            match next.turn.send(Turn::Ask(self.pass(name.clone()))) {
                Ok(()) => return,
                Err(Turn::Ask(pass)) => pass.defuse(),
                Err(Turn::Granted(_)) => {}
            }
        }
    }

    fn lines(&self) -> MutexGuard<'_, FastMap<Name, VecDeque<InLine>>> {
        sync::lock(&self.lines)
    }
}

fn next_present(line: &mut VecDeque<InLine>) -> Option<InLine> {
    while let Some(next) = line.pop_front() {
        if !next.turn.is_closed() {
            return Some(next);
        }
    }
    None
}

impl Pass {
    /// Takes the next in line out, for a release to take along.
    pub(crate) fn next(&self) -> Option<InLine> {
        let gate = self.gate.as_ref()?;
        let next = gate.lines().get_mut(&self.name).and_then(next_present)?;
        next.offered.store(true, Ordering::Release);
        Some(next)
    }

    /// Puts somebody back whom a release did not take along after all.
    pub(crate) fn put_back(&self, next: InLine) {
        let Some(gate) = &self.gate else { return };
        if let Some(line) = gate.lines().get_mut(&self.name) {
            line.push_front(next);
        }
    }

    /// Gives the right away without calling anybody.
    fn defuse(mut self) {
        self.gate = None;
    }
}

impl Drop for Pass {
    fn drop(&mut self) {
        if let Some(gate) = self.gate.take() {
            gate.call_next(&self.name);
        }
    }
}

impl InLine {
    /// Whether nobody waits for this turn any more.
    pub(crate) fn is_gone(&self) -> bool {
        self.turn.is_closed()
    }

    /// Tells the one in line; gives the turn back if nobody is there any more.
    pub(crate) fn tell(self, turn: Turn) -> Result<(), Turn> {
        self.turn.send(turn)
    }
}
