//! The schedule of faults: the same seed makes the same schedule.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

/// What can be broken.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Fault {
    /// A client process is stopped for longer than a lease.
    ClientStop,
    /// A client process is killed and another is started.
    ClientKill,
    /// The connections of a client are closed, and new ones are refused.
    ClientCut,
    /// Nothing passes between a client and the servers, and neither is notified.
    ClientSilent,
    /// Nothing passes between one server and all clients.
    NodeCut,
    /// Nothing passes between a majority of the servers and all clients.
    MajorityCut,
    /// Every message of a client is delayed.
    Delay,
    /// The replies to a client are lost, and its connections are closed later.
    Drop,
    /// The connections of a client are closed; its last requests arrive seconds later.
    Late,
    /// Every request of a client is executed a second time, later.
    Duplicate,
    /// A server is stopped for longer than a lease.
    ServerStop,
    /// A server is killed and started again on its data.
    ServerKill,
    /// A server is killed and started again without its data.
    ServerWipe,
    /// The leader or master is killed, and started again when another has taken over.
    LeaderKill,
    /// The leader or master is stopped for longer than a lease, and resumed.
    LeaderStop,
    /// The master goes on for a while without its replicas; then it is killed and one of them is
    /// promoted.
    CutOff,
    /// The clock of a server jumps forward, and stays there.
    ClockForward,
    /// The clock of a server jumps back, and stays there.
    ClockBack,
    /// The server closes the connections of all clients (`CLIENT KILL`).
    Disconnect,
    /// The server forgets its scripts (`SCRIPT FLUSH`).
    ScriptFlush,
    /// The disk of the lock file is full.
    DiskFull,
    /// Another program keeps the lock file busy for longer than a lease.
    FileBusy,
}

const NAMES: [(Fault, &str); 22] = [
    (Fault::ClientStop, "client-stop"),
    (Fault::ClientKill, "client-kill"),
    (Fault::ClientCut, "client-cut"),
    (Fault::ClientSilent, "client-silent"),
    (Fault::NodeCut, "node-cut"),
    (Fault::MajorityCut, "majority-cut"),
    (Fault::Delay, "delay"),
    (Fault::Drop, "drop"),
    (Fault::Late, "late"),
    (Fault::Duplicate, "duplicate"),
    (Fault::ServerStop, "server-stop"),
    (Fault::ServerKill, "server-kill"),
    (Fault::ServerWipe, "server-wipe"),
    (Fault::LeaderKill, "leader-kill"),
    (Fault::LeaderStop, "leader-stop"),
    (Fault::CutOff, "cut-off"),
    (Fault::ClockForward, "clock-forward"),
    (Fault::ClockBack, "clock-back"),
    (Fault::Disconnect, "disconnect"),
    (Fault::ScriptFlush, "script-flush"),
    (Fault::DiskFull, "disk-full"),
    (Fault::FileBusy, "file-busy"),
];

impl Fault {
    /// All faults, in the order of the documentation.
    pub fn all() -> impl Iterator<Item = Fault> {
        NAMES.iter().map(|(fault, _)| *fault)
    }

    /// How long it lasts, as parts of a ttl: beyond the lease where that is what it tests.
    fn lasts(self) -> (f64, f64) {
        match self {
            Fault::ClientStop
            | Fault::ClientSilent
            | Fault::ServerStop
            | Fault::LeaderStop
            | Fault::FileBusy => (1.2, 1.8),
            Fault::ClientCut | Fault::NodeCut | Fault::MajorityCut | Fault::DiskFull => (0.5, 1.6),
            Fault::Delay | Fault::Drop | Fault::Late | Fault::Duplicate => (0.6, 1.4),
            Fault::CutOff => (0.4, 0.8),
            Fault::ClientKill | Fault::ServerKill | Fault::ServerWipe | Fault::LeaderKill => {
                (0.1, 0.4)
            }
            Fault::ClockForward | Fault::ClockBack => (0.5, 1.0),
            Fault::Disconnect | Fault::ScriptFlush => (0.0, 0.1),
        }
    }
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = NAMES.iter().find(|(fault, _)| fault == self).map_or("", |(_, name)| name);
        f.pad(name)
    }
}

impl FromStr for Fault {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let found = NAMES.iter().find(|(_, name)| *name == text).map(|(fault, _)| *fault);
        let known = || NAMES.map(|(_, name)| name).join(", ");
        found.ok_or_else(|| format!("there is no fault {text}; there are {}", known()))
    }
}

/// One fault of a schedule.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Step {
    /// Its number.
    pub number: usize,
    /// When it begins, at the earliest, after the clients have started.
    pub at: Duration,
    /// How long it lasts.
    pub lasts: Duration,
    /// What is broken.
    pub fault: Fault,
    /// Decides whom it strikes.
    pub pick: u64,
}

/// How long the clients work before the first fault.
const FIRST: Duration = Duration::from_millis(1500);
/// After this many faults there is a pause of three leases, in which order can be judged.
const CALM_AFTER: usize = 6;

/// The faults of a run: each of `faults` once before one comes again, one after the other, until
/// `end`.
pub fn schedule(seed: u64, faults: &[Fault], ttl: Duration, end: Duration) -> Vec<Step> {
    let mut random = Random::new(seed);
    let mut steps = Vec::new();
    let mut round: Vec<Fault> = Vec::new();
    let mut at = FIRST;
    // Short faults may still fit where a long one did not.
    let mut left_out = 0;
    while left_out < faults.len() {
        if round.is_empty() {
            round = faults.to_vec();
            random.shuffle(&mut round);
        }
        let fault = round.remove(0);
        let (least, most) = fault.lasts();
        let lasts = ttl.mul_f64(random.between(least, most));
        if at + lasts > end {
            left_out += 1;
            continue;
        }
        steps.push(Step { number: steps.len(), at, lasts, fault, pick: random.next() });
        at += lasts + ttl.mul_f64(random.between(0.2, 0.6));
        if steps.len() % CALM_AFTER == 0 {
            at += 3 * ttl;
        }
    }
    steps
}

/// SplitMix64: small, and the same in every version of everything.
#[derive(Clone, Debug)]
pub struct Random(u64);

impl Random {
    /// A generator with this seed.
    pub fn new(seed: u64) -> Self {
        Self(seed)
    }

    /// The next number.
    #[expect(clippy::should_implement_trait, reason = "it has no end")]
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        mixed ^ (mixed >> 31)
    }

    /// A number below this one.
    pub fn below(&mut self, limit: u64) -> u64 {
        self.next() % limit.max(1)
    }

    /// A number between these.
    pub fn between(&mut self, least: f64, most: f64) -> f64 {
        let part = (self.next() >> 11) as f64 / (1_u64 << 53) as f64;
        least + (most - least) * part
    }

    /// Puts a list into another order.
    pub fn shuffle<T>(&mut self, list: &mut [T]) {
        for index in (1..list.len()).rev() {
            let other = self.below(index as u64 + 1) as usize;
            list.swap(index, other);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TTL: Duration = Duration::from_secs(2);
    const MINUTE: Duration = Duration::from_secs(60);

    fn planned(seed: u64) -> Vec<Step> {
        schedule(seed, &Fault::all().collect::<Vec<_>>(), TTL, MINUTE)
    }

    #[test]
    fn the_same_seed_makes_the_same_schedule() {
        assert_eq!(planned(7), planned(7));
        assert_ne!(planned(7), planned(8));
        // Over versions, too.
        let first: Vec<String> =
            planned(1).iter().take(3).map(|step| step.fault.to_string()).collect();
        assert_eq!(first, FIRST_OF_SEED_1);
    }

    const FIRST_OF_SEED_1: [&str; 3] = ["delay", "script-flush", "disk-full"];

    #[test]
    fn faults_follow_each_other_and_end_in_time() {
        let steps = planned(3);
        for pair in steps.windows(2) {
            assert!(pair[0].at + pair[0].lasts < pair[1].at, "{pair:?}");
        }
        assert!(steps.iter().all(|step| step.at + step.lasts <= MINUTE));
        assert!(steps.len() > 10, "{}", steps.len());
    }

    #[test]
    fn every_fault_comes_before_one_comes_again() {
        let kinds = [Fault::ClientKill, Fault::ServerKill, Fault::Delay];
        let steps = schedule(5, &kinds, TTL, MINUTE);
        let mut first: Vec<Fault> = steps.iter().take(3).map(|step| step.fault).collect();
        first.sort_unstable();
        let mut kinds = kinds.to_vec();
        kinds.sort_unstable();
        assert_eq!(first, kinds);
    }

    #[test]
    fn names_can_be_read_again() {
        for fault in Fault::all() {
            assert_eq!(fault.to_string().parse(), Ok(fault));
        }
        assert!("meteor".parse::<Fault>().is_err());
    }
}
