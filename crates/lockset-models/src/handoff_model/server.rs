//! What the server does: the scripts, one name, time in ticks.
//!
//! The differential test runs the same steps here and on a real server.

use super::rules::{Leases, Rule, Rules};

/// A claim, by its number.
pub type Id = u8;
/// A fencing token or the stamp of a fence; 0 is none.
pub type Token = u16;

/// All that the server remembers of one name.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct Server {
    /// Who holds it.
    pub lock: Option<Lock>,
    /// The greatest ticket or token given so far.
    pub fence: Token,
    /// Who waits, first come first.
    pub queue: Vec<QueueEntry>,
    /// The claims that are refused from now on, a bit each.
    pub tombstones: u64,
    /// For how many more ticks the lock is left free.
    pub free: u8,
}

/// A holder.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Lock {
    /// Which claim.
    pub id: Id,
    /// By which token.
    pub token: Token,
    /// For how many ticks.
    pub left: u8,
}

/// A waiter.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct QueueEntry {
    /// Which claim.
    pub id: Id,
    /// For how many ticks it lives without a heartbeat; 0: its deadline has passed.
    pub left: u8,
}

/// What a claim is told of itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Reply {
    /// The lock was free: the whole ttl.
    GrantedNow(Token),
    /// It holds already, with so much left.
    Granted(Token, u8),
    /// It waits: the fence, its place from 0, and what is left of the lease before it.
    Queued {
        /// The fence.
        stamp: Token,
        /// How many are before it.
        position: u8,
        /// What the holder has left.
        left: u8,
    },
    /// Another claim holds it, and this one must not wait.
    Busy,
    /// It neither holds nor waits, and never will.
    Gone,
}

impl Server {
    /// A tick passes.
    pub fn tick(&mut self) {
        self.lock = self.lock.filter(|lock| lock.left > 1);
        self.lock.iter_mut().for_each(|lock| lock.left -= 1);
        self.queue.iter_mut().for_each(|entry| entry.left = entry.left.saturating_sub(1));
        self.free = self.free.saturating_sub(1);
    }

    /// Whether this claim waits.
    pub fn is_queued(&self, id: Id) -> bool {
        self.queue.iter().any(|entry| entry.id == id)
    }

    /// Whether this claim holds.
    pub fn is_held_by(&self, id: Id) -> bool {
        self.held_by(id).is_some()
    }

    fn held_by(&self, id: Id) -> Option<Lock> {
        self.lock.filter(|lock| lock.id == id)
    }

    fn unqueue(&mut self, id: Id) {
        self.queue.retain(|entry| entry.id != id);
    }
}

/// One script on its way through the server.
#[derive(Debug)]
pub struct Script<'a> {
    server: &'a mut Server,
    rules: Rules,
    leases: Leases,
    /// The claims for whose inbox PUBLISH counts a subscriber, a bit each.
    reachable: u64,
    /// For how many ticks a release leaves the lock free, if this one does.
    courtesy: Option<u8>,
    /// Who was written to, and which token.
    pub pushed: Option<(Id, Token)>,
    /// Who was told that the lock is left free, and for how many ticks.
    pub notified: Option<(Id, u8)>,
    /// Who lost a place that still lived.
    pub evicted: Option<Id>,
}

impl<'a> Script<'a> {
    /// A script begins.
    pub fn new(server: &'a mut Server, rules: Rules, leases: Leases, reachable: u64) -> Self {
        let (courtesy, pushed, notified, evicted) = (None, None, None, None);
        Self { server, rules, leases, reachable, courtesy, pushed, notified, evicted }
    }

    /// A release leaves the lock free for so many ticks.
    pub fn with_courtesy(mut self, ticks: u8) -> Self {
        self.courtesy = Some(ticks);
        self
    }

    /// ACQUIRE: a claim's first request, or its repetition.
    pub fn acquire(&mut self, id: Id, wait: bool) -> Reply {
        if self.has_tombstone(id) {
            return Reply::Gone;
        }
        let is_reserved = self.is_left_free() && !self.server.queue.is_empty();
        self.take(id, wait, self.rules.keep(Rule::AcquireIsIdempotent), is_reserved)
    }

    /// HEARTBEAT: never inserts.
    pub fn heartbeat(&mut self, id: Id) -> Reply {
        if self.has_tombstone(id) {
            return Reply::Gone;
        }
        if let Some(lock) = self.server.held_by(id) {
            return match self.rules.keep(Rule::HeartbeatReportsGrant) {
                true => Reply::Granted(lock.token, lock.left),
                false => self.queued(id),
            };
        }
        if !self.refresh(id) {
            return Reply::Gone;
        }
        if self.rules.keep(Rule::HandOverWhenFree) {
            self.hand_over(Some(id));
        }
        self.reply_for(id)
    }

    /// RENEW: never creates.
    pub fn renew(&mut self, id: Id, token: Token) -> bool {
        let checks = self.rules.keep(Rule::RenewChecksToken);
        let lock = self.server.lock.as_mut();
        match lock.filter(|lock| lock.id == id && (lock.token == token || !checks)) {
            Some(lock) => lock.left = self.leases.ttl,
            None => return false,
        }
        true
    }

    /// END: release, or withdrawal if there is no token. Whether it held by that token, and what
    /// became of the next claim.
    pub fn end(
        &mut self,
        id: Id,
        token: Option<Token>,
        tombstone: bool,
        next: Option<Id>,
    ) -> (bool, Option<Reply>) {
        if tombstone {
            self.server.tombstones |= 1 << id;
        }
        self.server.unqueue(id);
        let held = self.server.held_by(id).map(|lock| lock.token);
        let released = held.is_some() && held == token;
        if held.is_some() && (released || token.is_none() || self.rules.keep(Rule::EndMatchesById))
        {
            self.server.lock = None;
        }
        let next = next.filter(|_| released);
        let is_free = held.is_some() && self.server.lock.is_none() && self.leave_free(next);
        if let Some(next) = next {
            self.refresh(next);
        }
        if !is_free {
            self.hand_over(next);
        }
        let Some(next) = next else { return (released, None) };
        if self.has_tombstone(next) && self.rules.keep(Rule::NextChecksTombstone) {
            return (true, Some(Reply::Gone));
        }
        let is_idempotent = self.rules.keep(Rule::NextIsIdempotent);
        (true, Some(self.take(next, true, is_idempotent, self.is_left_free())))
    }

    /// Courtesy: the lock stays free for those who poll, and the first waiter that lives and hears
    /// is told when that is over. Not if there is none, and no next claim either.
    fn leave_free(&mut self, next: Option<Id>) -> bool {
        let Some(ticks) = self.courtesy else { return false };
        let is_reachable =
            |entry: &&QueueEntry| entry.left > 0 && self.reachable & (1 << entry.id) != 0;
        let first = self.server.queue.iter().find(is_reachable).map(|entry| entry.id);
        if first.is_none() && next.is_none() {
            return false;
        }
        self.notified =
            first.filter(|_| self.rules.keep(Rule::FirstIsNotified)).map(|id| (id, ticks));
        self.server.free = ticks;
        true
    }

    /// Whether no waiter may be granted the lock now although it is free.
    fn is_left_free(&self) -> bool {
        self.server.free > 0 && self.rules.keep(Rule::LeftFreeStaysFree)
    }

    /// HAND-ON: a free lock goes to the first waiter that lives and hears. `me` hears by the reply.
    fn hand_over(&mut self, me: Option<Id>) {
        let mut at = 0;
        if self.is_left_free() {
            return;
        }
        while self.server.lock.is_none() && at < self.server.queue.len() {
            let QueueEntry { id, left } = self.server.queue[at];
            if left == 0 {
                self.server.queue.remove(at);
            } else if me == Some(id) || self.reachable & (1 << id) != 0 {
                self.server.queue.remove(at);
                let token = self.hold(id, self.leases.f);
                self.pushed = (me != Some(id)).then_some((id, token));
            } else if self.rules.keep(Rule::UnreachableKeepsEntry) {
                at += 1;
            } else {
                self.server.queue.remove(at);
                self.evicted = Some(id);
            }
        }
    }

    /// ACQUIRE from 2 on, and END 5. `is_kept`: the lock is left free, and not for this claim.
    fn take(&mut self, id: Id, wait: bool, is_idempotent: bool, is_reserved: bool) -> Reply {
        if is_idempotent && self.server.is_held_by(id) {
            return self.reply_for(id);
        }
        if is_idempotent && self.refresh(id) {
            self.hand_over(Some(id));
            return self.reply_for(id);
        }
        let hands_over = self.rules.keep(Rule::HandOverWhenFree);
        if hands_over {
            self.hand_over(None);
        }
        if self.server.lock.is_none()
            && !is_reserved
            && (hands_over || self.server.queue.is_empty())
        {
            return Reply::GrantedNow(self.hold(id, self.leases.ttl));
        }
        if !wait {
            return Reply::Busy;
        }
        // A member of a sorted set is there once, by its newest ticket.
        self.server.unqueue(id);
        self.next();
        self.server.queue.push(QueueEntry { id, left: self.leases.q });
        self.queued(id)
    }

    fn reply_for(&self, id: Id) -> Reply {
        match self.server.held_by(id) {
            Some(lock) => Reply::Granted(lock.token, lock.left),
            None => self.queued(id),
        }
    }

    fn queued(&self, id: Id) -> Reply {
        let position = self.server.queue.iter().position(|entry| entry.id == id).unwrap_or(0) as u8;
        let left = self.server.lock.map_or(self.server.free, |lock| lock.left);
        Reply::Queued { stamp: self.server.fence, position, left }
    }

    /// The place of this claim lives for another q, if it has one.
    fn refresh(&mut self, id: Id) -> bool {
        let entry = self.server.queue.iter_mut().find(|entry| entry.id == id);
        entry.map(|entry| entry.left = self.leases.q).is_some()
    }

    fn hold(&mut self, id: Id, left: u8) -> Token {
        let token = self.next();
        self.server.lock = Some(Lock { id, token, left });
        self.server.free = 0;
        token
    }

    /// NEXT: the next ticket or token.
    fn next(&mut self) -> Token {
        self.server.fence += 1;
        self.server.fence
    }

    fn has_tombstone(&self, id: Id) -> bool {
        self.server.tombstones & (1 << id) != 0
    }
}
