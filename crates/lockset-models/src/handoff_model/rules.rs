//! The rules of the hand-off that can be left out, to show that each of them is needed.

/// A rule of `docs/redis-handoff.md`, by the name it has there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rule {
    /// C2: a grant whose token is not above the stamp is void.
    Stamp,
    /// C2: validity counts from a request answered `queued`, never from one answered `granted`.
    CountsFromQueued,
    /// C2: validity counts from when a request was sent, not from when the grant was read.
    CountsFromSending,
    /// C3: an id is never queued again after `gone`.
    NewIdAfterGone,
    /// C5: the release of a dirty claim leaves a mark.
    DirtyReleaseLeavesTombstone,
    /// C5: a dirty claim that ends by `gone` or `lost` is ended on the server too.
    DirtyEndsAlways,
    /// C5: a withdrawal leaves a mark.
    WithdrawalLeavesTombstone,
    /// HAND-ON, in ACQUIRE and HEARTBEAT: a claim that finds the lock free hands it on.
    HandOverWhenFree,
    /// HAND-ON: a waiter that does not hear keeps its place.
    UnreachableKeepsEntry,
    /// ACQUIRE 2 and 3: a claim that holds or waits already is recognised.
    AcquireIsIdempotent,
    /// HEARTBEAT: a waiter that was granted the lock is told so.
    HeartbeatReportsGrant,
    /// RENEW: id and token must be those of the holder.
    RenewChecksToken,
    /// END 3: what bears the id goes, whatever its token.
    EndMatchesById,
    /// END 5: the next claim is refused if it is marked.
    NextChecksTombstone,
    /// END 5: a next claim that holds or waits already is recognised.
    NextIsIdempotent,
    /// Courtesy: no waiter is granted a lock that is left free.
    LeftFreeStaysFree,
    /// Courtesy: the first waiter is told when to look.
    FirstIsNotified,
}

/// All rules, or all but some.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Rules {
    missing: u32,
}

impl Rules {
    /// All of them.
    pub const ALL: Rules = Rules { missing: 0 };

    /// All but these.
    pub fn without(rules: &[Rule]) -> Self {
        Self { missing: rules.iter().fold(0, |missing, rule| missing | 1 << *rule as u32) }
    }

    /// Whether this rule is kept.
    pub fn keep(self, rule: Rule) -> bool {
        self.missing & (1 << rule as u32) == 0
    }
}

/// The lengths of the leases in ticks: of a waiter's place, of a lock that was handed over, and of
/// one that was taken or renewed. `q < f <= ttl`.
#[derive(Clone, Copy, Debug)]
pub struct Leases {
    /// Of a waiter's place.
    pub q: u8,
    /// The first one of a lock that was handed over.
    pub f: u8,
    /// Of a lock that was free, and of a renewed one.
    pub ttl: u8,
}

impl Leases {
    /// Leases that keep their order.
    pub fn new(q: u8, f: u8, ttl: u8) -> Self {
        assert!(q < f && f <= ttl, "q < f <= ttl is what the rules rest on: {q}, {f}, {ttl}");
        Self { q, f, ttl }
    }
}
