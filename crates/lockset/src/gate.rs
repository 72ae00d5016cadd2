//! The queue of one process, before the engine's queue.
//!
//! Exclusive claims of one process on one name wait here, first come first served. Only the first
//! of them talks to the engine, so they cost the engine one waiter together, and a release can
//! take the next claim along.

use std::collections::VecDeque;
use std::collections::hash_map::Entry;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};

use tokio::sync::oneshot;

use crate::clock::{Clock, Moment};
use crate::engine::Claim;
use crate::hash::FastMap;
use crate::name::Name;
use crate::options::ResolvedOptions;
use crate::sync;

/// One gate per client. `T` is a held lock, as a release hands it to the next claim.
#[derive(Debug)]
pub(crate) struct Gate<T> {
    /// A name is present while a pass for it exists. The queue holds the claims behind the pass.
    queues: Mutex<FastMap<Name, VecDeque<QueuedClaim<T>>>>,
    closed: AtomicBool,
}

/// A claim in the queue, as its predecessor sees it.
#[derive(Debug)]
pub(crate) struct QueuedClaim<T> {
    pub(crate) claim: Arc<Claim>,
    pub(crate) options: ResolvedOptions,
    turn: oneshot::Sender<Turn<T>>,
    offered: Arc<AtomicBool>,
}

/// What a queued claim receives when it is the first.
#[derive(Debug)]
pub(crate) enum Turn<T> {
    /// Send the request to the engine.
    Request(Pass<T>),
    /// The release of the claim before already obtained the lock.
    Granted(T),
}

/// The result of [`Gate::enter`].
pub(crate) enum GateEntry<T> {
    /// No other claim of this process is ahead.
    Pass(Pass<T>),
    Queued(PendingTurn<T>),
}

/// A claim in the queue, as its owner sees it.
#[derive(Debug)]
pub(crate) struct PendingTurn<T> {
    turn: oneshot::Receiver<Turn<T>>,
    /// Set when a release takes the claim along: from then on the engine may know it.
    pub(crate) offered: Arc<AtomicBool>,
}

impl<T> PendingTurn<T> {
    /// Waits for the turn. Returns `None` at `deadline`.
    pub(crate) async fn wait(mut self, clock: &Clock, deadline: Moment) -> Option<Turn<T>> {
        tokio::select! {
            biased;
            turn = &mut self.turn => return turn.ok(),
            () = clock.sleep_until(deadline) => {}
        }
        // The turn may have come at the last moment.
        self.turn.close();
        self.turn.try_recv().ok()
    }
}

/// The right to talk to the engine about a name for this process. Dropping it passes the right to
/// the next claim in the queue.
#[derive(Debug)]
pub(crate) struct Pass<T> {
    gate: Option<Arc<Gate<T>>>,
    name: Name,
}

impl<T> Default for Gate<T> {
    fn default() -> Self {
        Self { queues: Mutex::default(), closed: AtomicBool::new(false) }
    }
}

impl<T> Gate<T> {
    /// Returns a pass, or queues the claim if `queue` is set. Returns `None` if it may not queue,
    /// or the gate is closed.
    pub(crate) fn enter(
        self: &Arc<Self>,
        claim: &Arc<Claim>,
        options: &ResolvedOptions,
        queue: bool,
    ) -> Option<GateEntry<T>> {
        let mut queues = self.queues();
        if self.closed.load(Ordering::Acquire) {
            return None;
        }
        match queues.entry(claim.name.clone()) {
            Entry::Vacant(vacant) => {
                vacant.insert(VecDeque::new());
                Some(GateEntry::Pass(self.pass(claim.name.clone())))
            }
            Entry::Occupied(_) if !queue => None,
            Entry::Occupied(mut waiting) => {
                let (turn, receiver) = oneshot::channel();
                let offered = Arc::new(AtomicBool::new(false));
                let pending = PendingTurn { turn: receiver, offered: offered.clone() };
                let (claim, options) = (claim.clone(), options.clone());
                waiting.get_mut().push_back(QueuedClaim { claim, options, turn, offered });
                Some(GateEntry::Queued(pending))
            }
        }
    }

    /// Rejects all queued claims and all later ones.
    pub(crate) fn close(&self) {
        let mut queues = self.queues();
        self.closed.store(true, Ordering::Release);
        let rejected: Vec<VecDeque<_>> = queues.values_mut().map(std::mem::take).collect();
        // Dropping a claim wakes its task, which may call the gate.
        drop(queues);
        drop(rejected);
    }

    fn pass(self: &Arc<Self>, name: Name) -> Pass<T> {
        Pass { gate: Some(self.clone()), name }
    }

    /// Gives the turn to the next claim that still waits, or frees the name if there is none.
    /// A loop instead of recursion through `Pass::drop`: thousands of claims may have left.
    fn call_next(self: &Arc<Self>, name: &Name) {
        loop {
            let next = {
                let mut queues = self.queues();
                let next = queues.get_mut(name).and_then(next_present);
                if next.is_none() {
                    queues.remove(name);
                }
                next
            };
            let Some(next) = next else { return };
            match next.turn.send(Turn::Request(self.pass(name.clone()))) {
                Ok(()) => return,
                Err(Turn::Request(pass)) => pass.disarm(),
                Err(Turn::Granted(_)) => {}
            }
        }
    }

    fn queues(&self) -> MutexGuard<'_, FastMap<Name, VecDeque<QueuedClaim<T>>>> {
        sync::lock(&self.queues)
    }
}

fn next_present<T>(queue: &mut VecDeque<QueuedClaim<T>>) -> Option<QueuedClaim<T>> {
    while let Some(next) = queue.pop_front() {
        if !next.is_gone() {
            return Some(next);
        }
    }
    None
}

impl<T> Pass<T> {
    /// Removes the next claim from the queue, so that a release can take it along.
    pub(crate) fn next(&self) -> Option<QueuedClaim<T>> {
        let gate = self.gate.as_ref()?;
        let next = gate.queues().get_mut(&self.name).and_then(next_present)?;
        next.offered.store(true, Ordering::Release);
        Some(next)
    }

    /// Puts a claim back that a release did not take along after all.
    pub(crate) fn put_back(&self, next: QueuedClaim<T>) {
        let Some(gate) = &self.gate else { return };
        if let Some(queue) = gate.queues().get_mut(&self.name) {
            queue.push_front(next);
        }
    }

    /// Drops the pass without calling the next claim.
    fn disarm(mut self) {
        self.gate = None;
    }
}

impl<T> Drop for Pass<T> {
    fn drop(&mut self) {
        if let Some(gate) = self.gate.take() {
            gate.call_next(&self.name);
        }
    }
}

impl<T> QueuedClaim<T> {
    /// Whether the owner no longer waits for the turn.
    pub(crate) fn is_gone(&self) -> bool {
        self.turn.is_closed()
    }

    /// Gives the owner its turn, or returns the turn if the owner no longer waits.
    pub(crate) fn give(self, turn: Turn<T>) -> Result<(), Turn<T>> {
        self.turn.send(turn)
    }
}
