//! All that can happen next: somebody sends, the server executes, somebody reads, something breaks,
//! time passes.

use std::fmt;

use super::client::{Claim, Phase};
use super::scenario::{Scenario, Timers};
use super::server::{Answer, Id, Script};
use super::world::{Breach, Letter, Text, World};
use crate::explorer::Next;

/// Something that happens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    /// A client sends a request.
    Send(Id, Text),
    /// The server executes a request; PUBLISH to a dead connection may still count it.
    Execute(Letter, bool),
    /// The server executes a release, and leaves the lock free.
    LeaveFree(Letter),
    /// A client reads a reply or a push.
    Read(Letter),
    /// A push is lost.
    LosePush(Letter),
    /// The connection of a process is cut; so many of its requests may still arrive.
    Cut(u8, u32),
    /// It is made again, and the inbox subscribed.
    Reconnect(u8),
    /// A process dies; so many of its requests may still arrive.
    Crash(u8, u32),
    /// A tick passes.
    Tick,
}

impl fmt::Display for Step {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = |id: Id| char::from(b'A' + id);
        let late = |letter: &Letter| if letter.late { "late " } else { "" };
        match self {
            Step::Send(id, text) => write!(f, "{} sends {text:?}", name(*id)),
            Step::Execute(letter, _) => {
                write!(f, "executed: {}{:?} of {}", late(letter), letter.text, name(letter.id))
            }
            Step::LeaveFree(letter) => {
                write!(f, "executed, and left free: {:?} of {}", letter.text, name(letter.id))
            }
            Step::Read(letter) => write!(f, "{} reads {:?}", name(letter.id), letter.text),
            Step::LosePush(letter) => write!(f, "{:?} to {} is lost", letter.text, name(letter.id)),
            Step::Cut(process, late) => write!(f, "process {process} is cut off, {late} late"),
            Step::Reconnect(process) => write!(f, "process {process} reconnects"),
            Step::Crash(process, late) => write!(f, "process {process} dies, {late} late"),
            Step::Tick => f.write_str("tick"),
        }
    }
}

/// All steps from here.
pub(super) fn steps(scenario: &Scenario, world: &World) -> Vec<Next<Scenario>> {
    let mut all = Steps { scenario, world, found: Vec::with_capacity(16) };
    let served = |id: Id| world.claims[usize::from(id)].believes();
    if scenario.observed().is_some_and(served) {
        return all.found;
    }
    for id in scenario.ids() {
        all.sending(id);
    }
    for at in 0..world.mail.len() {
        all.delivering(at);
    }
    for process in 0..=scenario.processes.iter().copied().max().unwrap_or(0) {
        all.breaking(process);
    }
    all.passing();
    all.found
}

struct Steps<'a> {
    scenario: &'a Scenario,
    world: &'a World,
    found: Vec<Next<Scenario>>,
}

impl Steps<'_> {
    fn claim(&self, id: Id) -> &Claim {
        &self.world.claims[usize::from(id)]
    }

    fn add(&mut self, step: Step, mut world: World, breach: Option<Breach>) {
        world.normalize(self.scenario);
        let breach = breach.or_else(|| world.breach());
        self.found.push((step, world, breach));
    }

    /// What the client of this claim may send.
    fn sending(&mut self, id: Id) {
        let is_down = self.world.down & (1 << self.scenario.process(id)) != 0;
        if is_down || self.world.mail.len() >= self.scenario.letters {
            return;
        }
        let timed = self.scenario.timers.is_some();
        let claim = *self.claim(id);
        let due = !timed || claim.timer == 0;
        match claim.phase {
            Phase::Idle if self.may_begin(id) => self.send(id, Text::Acquire),
            // C3: until the first `queued`, ACQUIRE again after a reconnection.
            Phase::Asking if !self.world.is_creating(id) => self.send(id, Text::Acquire),
            // C3: after it only heartbeats.
            Phase::Waiting if due && self.is_quiet(id) => self.send(id, Text::Heartbeat),
            // C4: a grant that is not believed any more, or not yet, is renewed first.
            Phase::Holding if due && self.renewals(id) == 0 => {
                self.send(id, Text::Renew(claim.token));
            }
            Phase::Ending if !self.is_ending(id) => self.end(id, None),
            _ => {}
        }
        let may_leave = match claim.phase {
            Phase::Asking | Phase::Waiting => self.scenario.cancels,
            Phase::Holding => true,
            _ => false,
        };
        if may_leave && self.scenario.observed() != Some(id) {
            self.end(id, None);
            let gate = self.scenario.gate && id == 0 && claim.phase == Phase::Holding;
            if gate && self.claim(1).phase == Phase::Idle {
                self.end(id, Some(1));
            }
        }
    }

    fn may_begin(&self, id: Id) -> bool {
        let in_turn = !self.scenario.alike || id == 0 || self.claim(id - 1).phase != Phase::Idle;
        in_turn && !(self.scenario.gate && id == 1)
    }

    fn is_quiet(&self, id: Id) -> bool {
        let kind = |text| matches!(text, Text::Heartbeat | Text::Beaten(_));
        self.world.unanswered(id, kind) < self.scenario.beats
    }

    fn renewals(&self, id: Id) -> usize {
        self.world.unanswered(id, |text| matches!(text, Text::Renew(_) | Text::Renewed(..)))
    }

    fn is_ending(&self, id: Id) -> bool {
        self.world.unanswered(id, |text| matches!(text, Text::End(..) | Text::Ended(_))) > 0
    }

    fn send(&mut self, id: Id, text: Text) {
        let mut world = self.world.clone();
        let claim = &mut world.claims[usize::from(id)];
        if claim.phase == Phase::Idle {
            claim.begins(self.scenario.habits);
        }
        if let Some(timers) = self.scenario.timers {
            claim.timer = match text {
                Text::Heartbeat => timers.beat,
                Text::Renew(_) => self.scenario.habits.leases.ttl / 3,
                _ => claim.timer,
            };
        }
        world.mail.push(Letter { id, text, age: 0, way: 0, late: false });
        self.add(Step::Send(id, text), world, None);
    }

    /// END goes out, for the first time or again. C6: nothing else does from now on.
    fn end(&mut self, id: Id, next: Option<Id>) {
        let mut world = self.world.clone();
        let creating = world.is_creating(id);
        let claim = &mut world.claims[usize::from(id)];
        if claim.phase != Phase::Ending {
            claim.ends(self.scenario.habits, creating);
        }
        let token = Some(claim.token).filter(|token| *token > 0);
        let text = Text::End(token, claim.dirty, next);
        if let Some(next) = next {
            world.claims[usize::from(next)].begins(self.scenario.habits);
        }
        world.mail.push(Letter { id, text, age: 0, way: 0, late: false });
        self.add(Step::Send(id, text), world, None);
    }

    /// What may become of a letter.
    fn delivering(&mut self, at: usize) {
        let letter = self.world.mail[at];
        if !letter.text.is_request() {
            return self.read(at);
        }
        self.execute(at, false, false);
        if self.world.faults.courtesies > 0 && matches!(letter.text, Text::End(..)) {
            self.execute(at, false, true);
        }
        let is_deaf = |id: Id| self.world.down & (1 << self.scenario.process(id)) != 0;
        if self.world.server.queue.iter().any(|place| is_deaf(place.id)) {
            self.execute(at, true, false);
        }
    }

    fn execute(&mut self, at: usize, counts_the_dead: bool, leaves_free: bool) {
        let mut world = self.world.clone();
        let letter = world.mail.swap_remove(at);
        let scenario = self.scenario;
        let hears = |id: &Id| world.down & (1 << scenario.process(*id)) == 0;
        let heard = scenario.ids().filter(|id| counts_the_dead || hears(id));
        let heard = heard.fold(0, |heard, id| heard | 1 << id);
        let habits = scenario.habits;
        let mut script = Script::new(&mut world.server, habits.rules, habits.leases, heard);
        if leaves_free {
            script = script.with_courtesy(scenario.courtesy);
        }
        let id = letter.id;
        let reply = match letter.text {
            Text::Acquire => Text::Acquired(script.acquire(id, true)),
            Text::Heartbeat => Text::Beaten(script.heartbeat(id)),
            Text::Renew(token) => Text::Renewed(token, script.renew(id, token)),
            Text::End(token, mark, next) => {
                let (_, answer) = script.end(id, token, mark, next);
                world.over |= 1 << id;
                Text::Ended(next.map(|next| (next, answer)))
            }
            _ => return,
        };
        let (pushed, told, thrown_out) = (script.pushed, script.told, script.thrown_out);
        if leaves_free && world.server.free == 0 {
            // Nobody to be courteous to: the same as without.
            return;
        }
        world.faults.courtesies -= u8::from(leaves_free);
        if !letter.late {
            world.mail.push(Letter { text: reply, way: 0, ..letter });
        }
        if let Some((to, token)) = pushed
            && world.down & (1 << scenario.process(to)) == 0
        {
            let text = Text::Push(token);
            world.mail.push(Letter { id: to, text, age: 0, way: 0, late: false });
        }
        if let Some((to, ticks)) = told.filter(|_| scenario.timers.is_some()) {
            let text = Text::LeftFree(ticks);
            world.mail.push(Letter { id: to, text, age: 0, way: 0, late: false });
        }
        let breach = self.breach_of(&world, thrown_out);
        let step = match leaves_free {
            true => Step::LeaveFree(letter),
            false => Step::Execute(letter, counts_the_dead),
        };
        self.add(step, world, breach);
    }

    /// What a script must not do, seen from before and after.
    fn breach_of(&self, after: &World, thrown_out: Option<Id>) -> Option<Breach> {
        if thrown_out.is_some_and(|id| self.claim(id).phase != Phase::Crashed) {
            return Some(Breach::ThrownOut);
        }
        let before = &self.world.server;
        let holder = |lock: super::server::Lock| (lock.id, lock.token);
        let granted =
            after.server.lock.filter(|_| after.server.lock.map(holder) != before.lock.map(holder));
        if granted.is_some() && before.free > 0 && !before.queue.is_empty() {
            return Some(Breach::NotLeftFree);
        }
        granted.filter(|lock| lock.token <= before.fence).map(|_| Breach::TokenFell)
    }

    fn read(&mut self, at: usize) {
        let mut world = self.world.clone();
        let letter = world.mail.swap_remove(at);
        let is_push = matches!(letter.text, Text::Push(_) | Text::LeftFree(_));
        if self.world.faults.lost_pushes > 0 && is_push {
            let mut lost = world.clone();
            lost.faults.lost_pushes -= 1;
            self.add(Step::LosePush(letter), lost, None);
        }
        let habits = self.scenario.habits;
        let claim = &mut world.claims[usize::from(letter.id)];
        match letter.text {
            Text::Acquired(answer) | Text::Beaten(answer) => self.answer(claim, letter.age, answer),
            Text::Renewed(token, fine) => claim.renewed(habits, letter.age, token, fine),
            Text::Push(token) => {
                let before = *claim;
                claim.pushed(habits, token);
                self.set_timer(before, claim, letter.age, None);
            }
            // C9: it looks when that is over.
            Text::LeftFree(ticks) => match claim.phase {
                Phase::Waiting => claim.timer = claim.timer.min(ticks),
                _ => claim.told = Some(ticks),
            },
            Text::Ended(next) => {
                if claim.phase == Phase::Ending {
                    claim.phase = Phase::Done;
                }
                if let Some((next, Some(answer))) = next {
                    let next = &mut world.claims[usize::from(next)];
                    if !matches!(next.phase, Phase::Ending | Phase::Done) {
                        self.answer(next, letter.age, answer);
                    }
                }
            }
            _ => {}
        }
        self.add(Step::Read(letter), world, None);
    }

    fn answer(&self, claim: &mut Claim, age: u8, answer: Answer) {
        let before = *claim;
        claim.answered(self.scenario.habits, age, answer);
        self.set_timer(before, claim, age, Some(answer));
    }

    /// C4 and C9: when the next heartbeat or renewal is due.
    fn set_timer(&self, before: Claim, claim: &mut Claim, age: u8, answer: Option<Answer>) {
        let Some(timers) = self.scenario.timers else { return };
        let leases = self.scenario.habits.leases;
        match (claim.phase, answer) {
            (Phase::Waiting, Some(Answer::Queued { place, left, .. })) => {
                let beat = match before.phase {
                    Phase::Waiting => claim.timer,
                    _ => timers.beat.saturating_sub(age),
                };
                let beat = beat.min(claim.told.take().unwrap_or(beat));
                // Without a lease before it there is no end to look at.
                claim.timer = if left > 0 { beat.min(left + place) } else { beat };
            }
            (Phase::Holding, _) if claim.token != before.token => {
                claim.timer = match answer {
                    Some(Answer::GrantedNow(_)) => (leases.ttl / 3).saturating_sub(age),
                    _ => claim.counted.saturating_sub(leases.f - leases.f / 3),
                };
            }
            _ => {}
        }
    }

    /// What may break, and be mended.
    fn breaking(&mut self, process: u8) {
        let bit = 1 << process;
        let mine = |id: &Id| self.scenario.process(*id) == process;
        let phases = || self.scenario.ids().filter(mine).map(|id| self.claim(id).phase);
        if phases().any(|phase| phase == Phase::Crashed) {
            return;
        }
        if self.world.down & bit != 0 {
            let mut world = World { down: self.world.down & !bit, ..self.world.clone() };
            // C8: who waits shows that it lives at once.
            let mine = self.scenario.ids().filter(mine).map(usize::from);
            mine.for_each(|id| world.claims[id].timer = 0);
            return self.add(Step::Reconnect(process), world, None);
        }
        let watched = self.scenario.observed().is_some_and(|id| mine(&id));
        if phases().all(|phase| matches!(phase, Phase::Idle | Phase::Done)) {
            return;
        }
        if self.world.faults.cuts > 0 {
            self.cut(process, false);
        }
        if self.world.faults.crashes > 0 && !watched {
            self.cut(process, true);
        }
    }

    /// The connection ends: of its requests any may be lost and any may come late, what it was to
    /// be told is lost.
    fn cut(&mut self, process: u8, dies: bool) {
        let scenario = self.scenario;
        let mine = |id: Id| scenario.process(id) == process;
        let is_open = |letter: &Letter| mine(letter.id) && !letter.late && letter.text.is_request();
        let open = self.world.mail.iter().filter(|letter| is_open(letter)).count() as u32;
        let choices = if scenario.late { 1_u32 << open } else { 1 };
        for kept in 0..choices {
            let mut world = self.world.clone();
            for id in scenario.ids().filter(|id| mine(*id)) {
                let in_doubt = world.is_creating(id);
                let claim = &mut world.claims[usize::from(id)];
                match (dies, claim.phase) {
                    (true, Phase::Done) => {}
                    (true, _) => claim.phase = Phase::Crashed,
                    // What it will be ended with was decided when its END went out.
                    (false, phase) => claim.dirty |= in_doubt && phase != Phase::Ending,
                }
            }
            let mut nth = 0;
            world.mail.retain_mut(|letter| {
                if is_open(letter) {
                    letter.late = kept & (1 << nth) != 0;
                    nth += 1;
                    return letter.late;
                }
                letter.late || !mine(letter.id)
            });
            world.down |= 1 << process;
            let late = kept.count_ones();
            let step = match dies {
                true => Step::Crash(process, late),
                false => Step::Cut(process, late),
            };
            world.faults.crashes -= u8::from(dies);
            world.faults.cuts -= u8::from(!dies);
            self.add(step, world, None);
        }
    }

    fn passing(&mut self) {
        if self.scenario.timers.is_some_and(|timers| self.is_urgent(timers)) {
            return;
        }
        let mut world = self.world.clone();
        world.server.tick();
        world.claims.iter_mut().for_each(Claim::tick);
        for letter in &mut world.mail {
            letter.age = letter.age.saturating_add(1);
            letter.way = letter.way.saturating_add(1);
        }
        let mut breach = None;
        if let (Some(id), Some(timers)) = (self.scenario.observed(), self.scenario.timers) {
            let waits = self.claim(id).phase != Phase::Idle;
            let nobody = !self.world.claims.iter().any(Claim::believes);
            world.idle += u8::from(waits && nobody);
            breach = (world.idle > timers.bound).then_some(Breach::WaitsTooLong);
        }
        self.add(Step::Tick, world, breach);
    }

    /// Whether something must happen before time may pass.
    fn is_urgent(&self, timers: Timers) -> bool {
        let arriving = self.world.mail.iter().any(|letter| letter.way >= timers.way);
        arriving || self.scenario.ids().any(|id| self.is_due(id))
    }

    fn is_due(&self, id: Id) -> bool {
        let claim = self.claim(id);
        let is_down = self.world.down & (1 << self.scenario.process(id)) != 0;
        match claim.phase {
            Phase::Idle | Phase::Done | Phase::Crashed => false,
            // A connection is made again at once.
            _ if is_down => true,
            Phase::Asking => !self.world.is_creating(id),
            Phase::Waiting => claim.timer == 0 && self.is_quiet(id),
            Phase::Holding => claim.timer == 0 && self.renewals(id) == 0,
            Phase::Ending => !self.is_ending(id),
        }
    }
}
