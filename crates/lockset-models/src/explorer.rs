//! The search that all models share: breadth-first, every order of steps, each state once.

use std::collections::HashSet;
use std::fmt::{self, Debug, Display};
use std::hash::{BuildHasherDefault, Hash, Hasher};
use std::process::ExitCode;
use std::time::Instant;

/// Something that can be explored: where it begins, and what may happen next.
pub trait Model {
    /// One moment of the whole.
    type State: Hash;
    /// Something that happens.
    type Step: Display + Debug;
    /// A broken promise.
    type Violation: Copy + Debug;

    /// The state in which it begins.
    fn first(&self) -> Self::State;

    /// All that can happen from `state`, always in the same order.
    fn steps(&self, state: &Self::State) -> Vec<Next<Self>>;

    /// Whether this breach is one that is looked for.
    fn looks_for(&self, _breach: Self::Violation) -> bool {
        true
    }

    /// A number whose greatest value over all states is wanted.
    fn measure(&self, _state: &Self::State) -> u8 {
        0
    }
}

/// A step, what it leads to, and the promise it breaks.
pub type Next<M> = (<M as Model>::Step, <M as Model>::State, Option<<M as Model>::Violation>);

/// What a search found.
#[derive(Debug)]
pub struct Exploration<Step, Violation> {
    /// Different states that were reached.
    pub states: usize,
    /// Steps that were tried.
    pub steps: usize,
    /// The steps to the state that is farthest from the beginning.
    pub depth: usize,
    /// The greatest measure of any state.
    pub max_measure: u8,
    /// Every state that can be reached was reached.
    pub exhausted: bool,
    /// The shortest way to a broken promise.
    pub found: Option<(Violation, Vec<Step>)>,
}

impl<Step: Display, Violation: Debug> Display for Exploration<Step, Violation> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { states, steps, depth, .. } = self;
        let how = if self.exhausted { "all of them" } else { "not all" };
        write!(f, "{states} states ({how}), {steps} steps, depth {depth}")?;
        if let Some((violation, path)) = &self.found {
            write!(f, "; {violation:?} after {} steps:", path.len())?;
            for step in path {
                write!(f, "\n  {step}")?;
            }
        }
        Ok(())
    }
}

/// What an example does whose searches are too large for every day: `deep [millions]` explores each
/// until all states are seen, or as many millions.
#[allow(clippy::print_stdout, reason = "a tool that talks to a person")]
pub fn run_deep_searches<M: Model>(
    title: &str,
    usual: usize,
    searches: Vec<(&'static str, M)>,
) -> ExitCode {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let millions = match args.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        ["deep"] => Some(usual),
        ["deep", millions] => millions.parse().ok(),
        _ => None,
    };
    let Some(millions) = millions.map(|millions: usize| millions * 1_000_000) else {
        println!("usage: {title} deep [millions of states]");
        return ExitCode::FAILURE;
    };
    let mut broken = false;
    for (what, model) in searches {
        let began = Instant::now();
        let explored = explore(&model, millions);
        println!("{what}: {explored} in {:.0?}", began.elapsed());
        broken |= explored.found.is_some();
    }
    ExitCode::from(u8::from(broken))
}

/// Searches until a promise is broken, all states are seen, or there are more than `most`.
pub fn explore<M: Model>(model: &M, most: usize) -> Exploration<M::Step, M::Violation> {
    let first = model.first();
    let mut seen: HashSet<u128, BuildHasherDefault<PrehashedHasher>> = HashSet::default();
    seen.insert(fingerprint(&first));
    // By which step of which state each state was reached: enough to tell the way again.
    let mut parents: Vec<(u32, u32)> = vec![(0, 0)];
    let mut level = vec![(0_u32, first)];
    let mut explored = Exploration {
        states: 1,
        steps: 0,
        depth: 0,
        max_measure: 0,
        exhausted: false,
        found: None,
    };
    while !level.is_empty() {
        let mut next_level = Vec::new();
        for (index, state) in &level {
            for (nth, (step, next, violation)) in model.steps(state).into_iter().enumerate() {
                explored.steps += 1;
                if let Some(violation) = violation.filter(|violation| model.looks_for(*violation)) {
                    let mut path = path_to(model, &parents, *index);
                    path.push(step);
                    explored.found = Some((violation, path));
                    return explored;
                }
                explored.max_measure = explored.max_measure.max(model.measure(&next));
                if seen.insert(fingerprint(&next)) {
                    next_level.push((parents.len() as u32, next));
                    parents.push((*index, nth as u32));
                }
            }
            explored.states = parents.len();
            if explored.states > most {
                return explored;
            }
        }
        explored.depth += usize::from(!next_level.is_empty());
        level = next_level;
    }
    explored.exhausted = true;
    explored
}

/// The steps by which a state was reached first.
fn path_to<M: Model>(model: &M, parents: &[(u32, u32)], mut index: u32) -> Vec<M::Step> {
    let mut choices_taken = Vec::new();
    while index != 0 {
        let (before, nth) = parents[index as usize];
        choices_taken.push(nth);
        index = before;
    }
    let mut state = model.first();
    let mut path = Vec::new();
    for nth in choices_taken.into_iter().rev() {
        let (step, next, _) = model.steps(&state).swap_remove(nth as usize);
        path.push(step);
        state = next;
    }
    path
}

/// 128 bits of a state: among a hundred million states two with the same are not to be expected
/// (one chance in 10^22).
fn fingerprint(state: &impl Hash) -> u128 {
    let mut hasher = FingerprintHasher {
        low: 0x243F_6A88_85A3_08D3,
        high: 0x1319_8A2E_0370_7344,
        word: 0,
        bits: 0,
    };
    state.hash(&mut hasher);
    hasher.done()
}

/// Collects small values to words, and words to two products.
struct FingerprintHasher {
    low: u64,
    high: u64,
    word: u64,
    bits: u32,
}

impl FingerprintHasher {
    fn add(&mut self, value: u64, bits: u32) {
        if self.bits + bits > 64 {
            self.mix();
        }
        self.word |= value << self.bits;
        self.bits += bits;
    }

    fn mix(&mut self) {
        let fold = |a: u64, b: u64| {
            let product = u128::from(a).wrapping_mul(u128::from(b));
            (product as u64) ^ ((product >> 64) as u64)
        };
        self.low = fold(self.low ^ self.word, 0x9E37_79B9_7F4A_7C15).wrapping_add(self.word);
        self.high = fold(self.high.rotate_left(23) ^ self.word, 0xD6E8_FEB8_6659_FD93) ^ self.low;
        (self.word, self.bits) = (0, 0);
    }

    fn done(mut self) -> u128 {
        self.mix();
        let length = u64::from(self.bits);
        self.word = length;
        self.mix();
        u128::from(self.high) << 64 | u128::from(self.low)
    }
}

impl Hasher for FingerprintHasher {
    fn finish(&self) -> u64 {
        self.low
    }

    fn write(&mut self, bytes: &[u8]) {
        bytes.iter().for_each(|byte| self.write_u8(*byte));
    }

    fn write_u8(&mut self, value: u8) {
        self.add(u64::from(value), 8);
    }

    fn write_u16(&mut self, value: u16) {
        self.add(u64::from(value), 16);
    }

    fn write_u64(&mut self, value: u64) {
        self.mix();
        self.add(value, 64);
    }

    fn write_usize(&mut self, value: usize) {
        // Only lengths, and which variant an enum is: small ones.
        self.add(value as u64 & 0xFF, 8);
    }

    fn write_isize(&mut self, value: isize) {
        self.write_usize(value as usize);
    }
}

/// A fingerprint is mixed already.
#[derive(Default)]
struct PrehashedHasher(u64);

impl Hasher for PrehashedHasher {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        bytes.iter().for_each(|byte| self.0 = self.0 << 8 | u64::from(*byte));
    }

    fn write_u128(&mut self, value: u128) {
        self.0 = value as u64;
    }
}
