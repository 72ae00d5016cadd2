//! What a client makes of what it hears: the rules C1 to C5 for one claim.
//!
//! All times are relative to now: what is left of a span, or how long ago something was sent.

use super::rules::{Leases, Rule, Rules};
use super::server::{Reply, Token};

/// How far a claim has come, as its client knows.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Phase {
    /// Nothing was sent yet.
    #[default]
    Idle,
    /// ACQUIRE was sent, or a release took it along; not known to be queued.
    Asking,
    /// Known to be queued.
    Waiting,
    /// A grant is known. It is believed while `valid` is above 0.
    Holding,
    /// Only END is sent any more.
    Ending,
    /// Over.
    Done,
    /// Its process is dead.
    Crashed,
}

/// A claim, as its client knows it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Claim {
    /// How far it has come.
    pub phase: Phase,
    /// What is left of h + f, where h is when the last request was sent that was certainly executed
    /// before any grant.
    pub counted: u8,
    /// The greatest stamp of a `queued`.
    pub stamp: Token,
    /// The token of the grant; 0 is none.
    pub token: Token,
    /// What is left of the time for which the grant is believed.
    pub valid: u8,
    /// C5: a creating request was not answered. While ending: END leaves a mark.
    pub dirty: bool,
    /// When the next heartbeat or renewal is due, where timers are explored.
    pub timer: u8,
    /// When it is to look, if it was told before it knew that it waits.
    pub notified: Option<u8>,
}

/// The rules and leases that a client goes by.
#[derive(Clone, Copy, Debug)]
pub struct ClientRules {
    /// Which rules it keeps.
    pub rules: Rules,
    /// How long leases are.
    pub leases: Leases,
}

impl Claim {
    /// Whether its owner acts as the holder.
    pub fn believes_it_holds(&self) -> bool {
        self.phase == Phase::Holding && self.valid > 0
    }

    /// C1: the first request that may queue it goes out.
    pub fn begin(&mut self, client_rules: ClientRules) {
        self.phase = Phase::Asking;
        self.counted = client_rules.leases.f;
    }

    /// A request sent `age` ago was answered.
    pub fn on_reply(&mut self, client_rules: ClientRules, age: u8, reply: Reply) {
        let Leases { f, ttl, .. } = client_rules.leases;
        match reply {
            Reply::GrantedNow(token) => self.granted(client_rules, token, ttl.saturating_sub(age)),
            Reply::Granted(token, left) => {
                let until = match client_rules.rules.keep(Rule::CountsFromQueued) {
                    true => self.counted.max(left.saturating_sub(age)),
                    false => f.saturating_sub(age),
                };
                self.granted(client_rules, token, until);
            }
            Reply::Queued { stamp, .. } => self.queued(client_rules, age, stamp),
            Reply::Gone => self.gone(client_rules),
            Reply::Busy => self.phase = Phase::Done,
        }
    }

    /// A push was read.
    pub fn pushed(&mut self, client_rules: ClientRules, token: Token) {
        let until = match client_rules.rules.keep(Rule::CountsFromSending) {
            true => self.counted,
            false => client_rules.leases.f,
        };
        self.granted(client_rules, token, until);
    }

    /// A renewal sent `age` ago was answered.
    pub fn renewed(&mut self, client_rules: ClientRules, age: u8, token: Token, fine: bool) {
        if token != self.token || self.phase != Phase::Holding {
            return;
        }
        match fine {
            true => self.valid = self.valid.max(client_rules.leases.ttl.saturating_sub(age)),
            false => self.on_loss(client_rules),
        }
    }

    /// Its owner releases it or gives up waiting: C5 decides on the mark. `unanswered`: a request
    /// that may create it is under way.
    pub fn begin_end(&mut self, client_rules: ClientRules, unanswered: bool) {
        let holds = self.phase == Phase::Holding;
        let in_doubt = self.dirty || unanswered;
        self.dirty = match holds {
            true => in_doubt && client_rules.rules.keep(Rule::DirtyReleaseLeavesTombstone),
            false => client_rules.rules.keep(Rule::WithdrawalLeavesTombstone),
        };
        if !holds {
            self.token = 0;
        }
        self.phase = Phase::Ending;
    }

    /// A tick passes.
    pub fn tick(&mut self) {
        self.counted = self.counted.saturating_sub(1);
        self.valid = self.valid.saturating_sub(1);
        self.timer = self.timer.saturating_sub(1);
        self.notified = self.notified.map(|notified| notified.saturating_sub(1));
    }

    /// C2: a grant counts if it is above the stamp and above the one that is known.
    fn granted(&mut self, client_rules: ClientRules, token: Token, until: u8) {
        if client_rules.rules.keep(Rule::Stamp) && token <= self.stamp {
            return;
        }
        if token > self.token {
            (self.phase, self.token, self.valid) = (Phase::Holding, token, until);
        } else if token == self.token {
            self.valid = self.valid.max(until);
        }
    }

    /// C1, and C2 for a grant that is known already.
    fn queued(&mut self, client_rules: ClientRules, age: u8, stamp: Token) {
        self.counted = self.counted.max(client_rules.leases.f.saturating_sub(age));
        self.stamp = self.stamp.max(stamp);
        if self.phase == Phase::Holding {
            if self.token > self.stamp || !client_rules.rules.keep(Rule::Stamp) {
                self.valid = self.valid.max(self.counted);
                return;
            }
            (self.token, self.valid) = (0, 0);
        }
        self.phase = Phase::Waiting;
    }

    /// C3.
    fn gone(&mut self, client_rules: ClientRules) {
        match client_rules.rules.keep(Rule::NewIdAfterGone) {
            true => self.on_loss(client_rules),
            false => self.phase = Phase::Asking,
        }
    }

    /// C5: a dirty claim that is over must be ended where it may yet arrive.
    fn on_loss(&mut self, client_rules: ClientRules) {
        let in_doubt = self.dirty && client_rules.rules.keep(Rule::DirtyEndsAlways);
        self.phase = if in_doubt { Phase::Ending } else { Phase::Done };
        (self.token, self.valid) = (0, 0);
    }
}
