//! One moment of the whole: the server, the claims, and what is under way between them.

use super::client::{Claim, Phase};
use super::scenario::Scenario;
use super::server::{Id, Reply, Server, Token};

/// At most so many claims.
pub(super) const CLAIMS: usize = 3;

/// A state of the model. Two states that differ only by when they are, or by the values but not the
/// order of tokens, are the same.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct World {
    /// The server.
    pub server: Server,
    /// The claims, as their clients know them.
    pub claims: [Claim; CLAIMS],
    /// The processes whose connection is down, a bit each.
    pub down: u8,
    /// What is under way, in any order.
    pub in_flight: Vec<Message>,
    /// The claims that are over: their END was executed, or their client forgot them.
    pub over: u8,
    /// Faults that may still happen.
    pub faults: Faults,
    /// For how many ticks the observed waiter waited while no live client held.
    pub idle: u8,
}

/// How many faults of each kind happen at most.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Faults {
    /// Connections cut.
    pub cuts: u8,
    /// Processes killed.
    pub crashes: u8,
    /// Pushes lost although the connection stands.
    pub lost_pushes: u8,
    /// Releases that leave the lock free.
    pub courtesies: u8,
}

/// Something under way.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Message {
    /// Whose it is.
    pub id: Id,
    /// What it says.
    pub payload: Payload,
    /// How long ago the request was sent.
    pub age: u8,
    /// For how long it has been under way itself, where that is bounded.
    pub transit: u8,
    /// Its connection was given up: it may arrive, its reply does not.
    pub late: bool,
}

/// What a letter says.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Payload {
    /// A request.
    Acquire,
    /// A request.
    Heartbeat,
    /// A request.
    Renew(Token),
    /// A request; a withdrawal has no token.
    End(Option<Token>, bool, Option<Id>),
    /// The reply to ACQUIRE.
    AcquireReply(Reply),
    /// The reply to HEARTBEAT.
    HeartbeatReply(Reply),
    /// The reply to RENEW.
    RenewReply(Token, bool),
    /// The reply to END, with what became of the next claim; without an answer it is untouched.
    EndReply(Option<(Id, Option<Reply>)>),
    /// A grant.
    Push(Token),
    /// The lock is left free for so many ticks. Only where timers are explored.
    LeftFree(u8),
}

impl Payload {
    /// Whether the server is to read it.
    pub fn is_request(self) -> bool {
        matches!(self, Payload::Acquire | Payload::Heartbeat | Payload::Renew(_) | Payload::End(..))
    }
}

/// A promise that was broken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Violation {
    /// S1.
    TwoHolders,
    /// I1: a client believes that it holds by another token, or for longer than it does.
    HeldWithoutLease,
    /// I2: a grant whose token is not above all before.
    TokenFell,
    /// I3: a claim holds or waits after its end.
    AliveAfterEnd,
    /// A claim holds and waits, or waits twice.
    DuplicateEntry,
    /// A live waiter lost its place.
    LiveWaiterEvicted,
    /// A lock that was left free was granted before its time.
    NotLeftFree,
    /// The observed waiter waited for longer than the bound while no live client held.
    WaitsTooLong,
}

impl World {
    /// The promise that is broken in this state.
    pub fn violation(&self) -> Option<Violation> {
        let holders = || (0..).zip(&self.claims).filter(|(_, claim)| claim.believes_it_holds());
        if holders().count() > 1 {
            return Some(Violation::TwoHolders);
        }
        for (id, claim) in holders() {
            let lock = self.server.lock.filter(|lock| lock.id == id && lock.token == claim.token);
            if lock.is_none_or(|lock| lock.left < claim.valid) {
                return Some(Violation::HeldWithoutLease);
            }
        }
        for id in 0..CLAIMS as Id {
            let held = self.server.is_held_by(id);
            let entries = self.server.queue.iter().filter(|entry| entry.id == id).count();
            if usize::from(held) + entries > 1 {
                return Some(Violation::DuplicateEntry);
            }
            if (held || entries > 0) && self.over & (1 << id) != 0 {
                return Some(Violation::AliveAfterEnd);
            }
        }
        None
    }

    /// A request that may create this claim was sent over the connection that stands, and its
    /// answer was not read.
    pub fn is_creating(&self, id: Id) -> bool {
        self.in_flight.iter().filter(|message| !message.late).any(|message| match message.payload {
            Payload::Acquire | Payload::AcquireReply(_) => message.id == id,
            Payload::End(_, _, next) => next == Some(id),
            Payload::EndReply(next) => next.is_some_and(|(next, _)| next == id),
            _ => false,
        })
    }

    /// How many requests of this kind were sent over the connection that stands, without an answer
    /// that was read.
    pub fn unanswered(&self, id: Id, kind: fn(Payload) -> bool) -> usize {
        let of_process = self.in_flight.iter().filter(|message| message.id == id && !message.late);
        of_process.filter(|message| kind(message.payload)).count()
    }

    /// Brings a state to the one form that all states have that are the same.
    pub fn normalize(&mut self, scenario: &Scenario) {
        for (id, claim) in self.claims.iter_mut().enumerate() {
            let Claim { phase, dirty, token, .. } = *claim;
            match phase {
                Phase::Done | Phase::Crashed => *claim = Claim { phase, ..Claim::default() },
                Phase::Ending => *claim = Claim { phase, dirty, token, ..Claim::default() },
                _ => {}
            }
            if phase == Phase::Done {
                self.over |= 1 << id;
            }
        }
        let claims = &self.claims;
        self.in_flight.retain(|message| !is_ignored(claims, message));
        let oldest = scenario.client_rules.leases.ttl;
        for message in &mut self.in_flight {
            let ageless = message.late
                || matches!(
                    message.payload,
                    Payload::End(_, _, None) | Payload::Push(_) | Payload::LeftFree(_)
                );
            message.age = if ageless { 0 } else { message.age.min(oldest) };
            if scenario.timers.is_none() {
                message.transit = 0;
                clear_position(&mut message.payload);
            }
        }
        self.renumber();
        self.in_flight.sort_unstable();
    }

    /// Tokens by their rank: only their order matters.
    fn renumber(&mut self) {
        let mut known = [0; 32];
        let mut count = 0;
        self.each_token(|token| {
            if *token > 0 && !known[..count].contains(token) {
                known[count] = *token;
                count += 1;
            }
        });
        let known = &mut known[..count];
        known.sort_unstable();
        let rank = |token: Token| known.iter().position(|one| *one == token);
        self.each_token(|token| *token = rank(*token).map_or(0, |rank| rank as Token + 1));
    }

    fn each_token(&mut self, mut visit: impl FnMut(&mut Token)) {
        visit(&mut self.server.fence);
        self.server.lock.iter_mut().for_each(|lock| visit(&mut lock.token));
        for claim in &mut self.claims {
            visit(&mut claim.stamp);
            visit(&mut claim.token);
        }
        let mut in_reply = |reply: &mut Reply| match reply {
            Reply::GrantedNow(token) | Reply::Granted(token, _) => visit(token),
            Reply::Queued { stamp, .. } => visit(stamp),
            Reply::Busy | Reply::Gone => {}
        };
        for message in &mut self.in_flight {
            match &mut message.payload {
                Payload::AcquireReply(reply) | Payload::HeartbeatReply(reply) => in_reply(reply),
                Payload::EndReply(Some((_, Some(reply)))) => in_reply(reply),
                _ => {}
            }
        }
        for message in &mut self.in_flight {
            match &mut message.payload {
                Payload::Renew(token) | Payload::RenewReply(token, _) | Payload::Push(token) => {
                    visit(token)
                }
                Payload::End(Some(token), ..) => visit(token),
                _ => {}
            }
        }
    }
}

/// A letter to a claim that would make nothing of it.
fn is_ignored(claims: &[Claim; CLAIMS], message: &Message) -> bool {
    let phase = claims[usize::from(message.id)].phase;
    let over = matches!(phase, Phase::Done | Phase::Crashed);
    match message.payload {
        Payload::AcquireReply(_)
        | Payload::HeartbeatReply(_)
        | Payload::RenewReply(..)
        | Payload::Push(_)
        | Payload::LeftFree(_) => over || phase == Phase::Ending,
        Payload::EndReply(None) => over,
        _ => false,
    }
}

/// The place and what is left before it only set timers.
fn clear_position(payload: &mut Payload) {
    let (Payload::AcquireReply(reply)
    | Payload::HeartbeatReply(reply)
    | Payload::EndReply(Some((_, Some(reply))))) = payload
    else {
        return;
    };
    if let Reply::Queued { position, left, .. } = reply {
        (*position, *left) = (0, 0);
    }
}
