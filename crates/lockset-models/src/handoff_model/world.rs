//! One moment of the whole: the server, the claims, and what is under way between them.

use super::client::{Claim, Phase};
use super::scenario::Scenario;
use super::server::{Answer, Id, Server, Token};

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
    pub mail: Vec<Letter>,
    /// The claims that are over: their END was executed, or their client forgot them.
    pub over: u8,
    /// Faults that may still happen.
    pub faults: Faults,
    /// For how many ticks the observed waiter waited while nobody alive held.
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
pub struct Letter {
    /// Whose it is.
    pub id: Id,
    /// What it says.
    pub text: Text,
    /// How long ago the request was sent.
    pub age: u8,
    /// For how long it has been under way itself, where that is bounded.
    pub way: u8,
    /// Its connection was given up: it may arrive, its reply does not.
    pub late: bool,
}

/// What a letter says.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Text {
    /// A request.
    Acquire,
    /// A request.
    Heartbeat,
    /// A request.
    Renew(Token),
    /// A request; a withdrawal has no token.
    End(Option<Token>, bool, Option<Id>),
    /// The reply to ACQUIRE.
    Acquired(Answer),
    /// The reply to HEARTBEAT.
    Beaten(Answer),
    /// The reply to RENEW.
    Renewed(Token, bool),
    /// The reply to END, with what became of the next claim; without an answer it is untouched.
    Ended(Option<(Id, Option<Answer>)>),
    /// A grant.
    Push(Token),
    /// The lock is left free for so many ticks. Only where timers are explored.
    LeftFree(u8),
}

impl Text {
    /// Whether the server is to read it.
    pub fn is_request(self) -> bool {
        matches!(self, Text::Acquire | Text::Heartbeat | Text::Renew(_) | Text::End(..))
    }
}

/// A promise that was broken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Breach {
    /// S1.
    TwoBelievers,
    /// I1: somebody believes by another token or for longer than the lock is theirs.
    BeliefWithoutLease,
    /// I2: a grant whose token is not above all before.
    TokenFell,
    /// I3: a claim holds or waits after its end.
    AfterTheEnd,
    /// A claim holds and waits, or waits twice.
    BesideItself,
    /// A live waiter lost its place.
    ThrownOut,
    /// A lock that was left free was granted before its time.
    NotLeftFree,
    /// The observed waiter waited for longer than the bound while nobody alive held.
    WaitsTooLong,
}

impl World {
    /// The promise that is broken in this state.
    pub fn breach(&self) -> Option<Breach> {
        let believers = || (0..).zip(&self.claims).filter(|(_, claim)| claim.believes());
        if believers().count() > 1 {
            return Some(Breach::TwoBelievers);
        }
        for (id, claim) in believers() {
            let lock = self.server.lock.filter(|lock| lock.id == id && lock.token == claim.token);
            if lock.is_none_or(|lock| lock.left < claim.valid) {
                return Some(Breach::BeliefWithoutLease);
            }
        }
        for id in 0..CLAIMS as Id {
            let held = self.server.is_held_by(id);
            let places = self.server.queue.iter().filter(|place| place.id == id).count();
            if usize::from(held) + places > 1 {
                return Some(Breach::BesideItself);
            }
            if (held || places > 0) && self.over & (1 << id) != 0 {
                return Some(Breach::AfterTheEnd);
            }
        }
        None
    }

    /// A request that may create this claim was sent over the connection that stands, and its
    /// answer was not read.
    pub fn is_creating(&self, id: Id) -> bool {
        self.mail.iter().filter(|letter| !letter.late).any(|letter| match letter.text {
            Text::Acquire | Text::Acquired(_) => letter.id == id,
            Text::End(_, _, next) => next == Some(id),
            Text::Ended(next) => next.is_some_and(|(next, _)| next == id),
            _ => false,
        })
    }

    /// How many requests of this kind were sent over the connection that stands, without an answer
    /// that was read.
    pub fn unanswered(&self, id: Id, kind: fn(Text) -> bool) -> usize {
        let mine = self.mail.iter().filter(|letter| letter.id == id && !letter.late);
        mine.filter(|letter| kind(letter.text)).count()
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
        self.mail.retain(|letter| !is_idle(claims, letter));
        let oldest = scenario.habits.leases.ttl;
        for letter in &mut self.mail {
            let ageless = letter.late
                || matches!(letter.text, Text::End(_, _, None) | Text::Push(_) | Text::LeftFree(_));
            letter.age = if ageless { 0 } else { letter.age.min(oldest) };
            if scenario.timers.is_none() {
                letter.way = 0;
                forget_place(&mut letter.text);
            }
        }
        self.renumber();
        self.mail.sort_unstable();
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
        let mut in_answer = |answer: &mut Answer| match answer {
            Answer::GrantedNow(token) | Answer::Granted(token, _) => visit(token),
            Answer::Queued { stamp, .. } => visit(stamp),
            Answer::Busy | Answer::Gone => {}
        };
        for letter in &mut self.mail {
            match &mut letter.text {
                Text::Acquired(answer) | Text::Beaten(answer) => in_answer(answer),
                Text::Ended(Some((_, Some(answer)))) => in_answer(answer),
                _ => {}
            }
        }
        for letter in &mut self.mail {
            match &mut letter.text {
                Text::Renew(token) | Text::Renewed(token, _) | Text::Push(token) => visit(token),
                Text::End(Some(token), ..) => visit(token),
                _ => {}
            }
        }
    }
}

/// A letter to a claim that would make nothing of it.
fn is_idle(claims: &[Claim; CLAIMS], letter: &Letter) -> bool {
    let phase = claims[usize::from(letter.id)].phase;
    let over = matches!(phase, Phase::Done | Phase::Crashed);
    match letter.text {
        Text::Acquired(_)
        | Text::Beaten(_)
        | Text::Renewed(..)
        | Text::Push(_)
        | Text::LeftFree(_) => over || phase == Phase::Ending,
        Text::Ended(None) => over,
        _ => false,
    }
}

/// The place and what is left before it only set timers.
fn forget_place(text: &mut Text) {
    let (Text::Acquired(answer) | Text::Beaten(answer) | Text::Ended(Some((_, Some(answer))))) =
        text
    else {
        return;
    };
    if let Answer::Queued { place, left, .. } = answer {
        (*place, *left) = (0, 0);
    }
}
