//! All that can happen next: a client sends, the server executes, a client reads, something breaks,
//! time passes.

use std::fmt;

use super::client::{Claim, Phase};
use super::scenario::{Scenario, Timers};
use super::server::{Id, Reply, Script};
use super::world::{Message, Payload, Violation, World};
use crate::explorer::Next;

/// Something that happens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    /// A client sends a request.
    Send(Id, Payload),
    /// The server executes a request; PUBLISH to a dead connection may still count it.
    Execute(Message, bool),
    /// The server executes a release, and leaves the lock free.
    LeaveFree(Message),
    /// A client reads a reply or a push.
    Read(Message),
    /// A push is lost.
    LosePush(Message),
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
        let late = |message: &Message| if message.late { "late " } else { "" };
        match self {
            Step::Send(id, payload) => write!(f, "{} sends {payload:?}", name(*id)),
            Step::Execute(message, _) => {
                write!(
                    f,
                    "executed: {}{:?} of {}",
                    late(message),
                    message.payload,
                    name(message.id)
                )
            }
            Step::LeaveFree(message) => {
                write!(f, "executed, and left free: {:?} of {}", message.payload, name(message.id))
            }
            Step::Read(message) => write!(f, "{} reads {:?}", name(message.id), message.payload),
            Step::LosePush(message) => {
                write!(f, "{:?} to {} is lost", message.payload, name(message.id))
            }
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
    let served = |id: Id| world.claims[usize::from(id)].believes_it_holds();
    if scenario.observed().is_some_and(served) {
        return all.found;
    }
    for id in scenario.ids() {
        all.send_steps(id);
    }
    for at in 0..world.in_flight.len() {
        all.delivery_steps(at);
    }
    for process in 0..=scenario.processes.iter().copied().max().unwrap_or(0) {
        all.fault_steps(process);
    }
    all.tick_step();
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

    fn add(&mut self, step: Step, mut world: World, violation: Option<Violation>) {
        world.normalize(self.scenario);
        let violation = violation.or_else(|| world.violation());
        self.found.push((step, world, violation));
    }

    /// What the client of this claim may send.
    fn send_steps(&mut self, id: Id) {
        let is_down = self.world.down & (1 << self.scenario.process(id)) != 0;
        if is_down || self.world.in_flight.len() >= self.scenario.messages {
            return;
        }
        let timed = self.scenario.timers.is_some();
        let claim = *self.claim(id);
        let due = !timed || claim.timer == 0;
        match claim.phase {
            Phase::Idle if self.may_begin(id) => self.send(id, Payload::Acquire),
            // C3: until the first `queued`, ACQUIRE again after a reconnection.
            Phase::Asking if !self.world.is_creating(id) => self.send(id, Payload::Acquire),
            // C3: after it only heartbeats.
            Phase::Waiting if due && self.may_send_heartbeat(id) => {
                self.send(id, Payload::Heartbeat)
            }
            // C4: a grant that is not believed any more, or not yet, is renewed first.
            Phase::Holding if due && self.renewals_in_flight(id) == 0 => {
                self.send(id, Payload::Renew(claim.token));
            }
            Phase::Ending if !self.end_in_flight(id) => self.end(id, None),
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
        let in_turn =
            !self.scenario.symmetric || id == 0 || self.claim(id - 1).phase != Phase::Idle;
        in_turn && !(self.scenario.gate && id == 1)
    }

    fn may_send_heartbeat(&self, id: Id) -> bool {
        let kind = |payload| matches!(payload, Payload::Heartbeat | Payload::HeartbeatReply(_));
        self.world.unanswered(id, kind) < self.scenario.heartbeats_in_flight
    }

    fn renewals_in_flight(&self, id: Id) -> usize {
        self.world.unanswered(id, |payload| {
            matches!(payload, Payload::Renew(_) | Payload::RenewReply(..))
        })
    }

    fn end_in_flight(&self, id: Id) -> bool {
        self.world
            .unanswered(id, |payload| matches!(payload, Payload::End(..) | Payload::EndReply(_)))
            > 0
    }

    fn send(&mut self, id: Id, payload: Payload) {
        let mut world = self.world.clone();
        let claim = &mut world.claims[usize::from(id)];
        if claim.phase == Phase::Idle {
            claim.begin(self.scenario.client_rules);
        }
        if let Some(timers) = self.scenario.timers {
            claim.timer = match payload {
                Payload::Heartbeat => timers.heartbeat_interval,
                Payload::Renew(_) => self.scenario.client_rules.leases.ttl / 3,
                _ => claim.timer,
            };
        }
        world.in_flight.push(Message { id, payload, age: 0, transit: 0, late: false });
        self.add(Step::Send(id, payload), world, None);
    }

    /// END goes out, for the first time or again. C6: nothing else does from now on.
    fn end(&mut self, id: Id, next: Option<Id>) {
        let mut world = self.world.clone();
        let creating = world.is_creating(id);
        let claim = &mut world.claims[usize::from(id)];
        if claim.phase != Phase::Ending {
            claim.begin_end(self.scenario.client_rules, creating);
        }
        let token = Some(claim.token).filter(|token| *token > 0);
        let payload = Payload::End(token, claim.dirty, next);
        if let Some(next) = next {
            world.claims[usize::from(next)].begin(self.scenario.client_rules);
        }
        world.in_flight.push(Message { id, payload, age: 0, transit: 0, late: false });
        self.add(Step::Send(id, payload), world, None);
    }

    /// What may become of a letter.
    fn delivery_steps(&mut self, at: usize) {
        let message = self.world.in_flight[at];
        if !message.payload.is_request() {
            return self.read(at);
        }
        self.execute(at, false, false);
        if self.world.faults.courtesies > 0 && matches!(message.payload, Payload::End(..)) {
            self.execute(at, false, true);
        }
        let is_unreachable = |id: Id| self.world.down & (1 << self.scenario.process(id)) != 0;
        if self.world.server.queue.iter().any(|entry| is_unreachable(entry.id)) {
            self.execute(at, true, false);
        }
    }

    fn execute(&mut self, at: usize, counts_dead_subscribers: bool, leaves_lock_free: bool) {
        let mut world = self.world.clone();
        let message = world.in_flight.swap_remove(at);
        let scenario = self.scenario;
        let is_reachable = |id: &Id| world.down & (1 << scenario.process(*id)) == 0;
        let reachable = scenario.ids().filter(|id| counts_dead_subscribers || is_reachable(id));
        let reachable = reachable.fold(0, |reachable, id| reachable | 1 << id);
        let client_rules = scenario.client_rules;
        let mut script =
            Script::new(&mut world.server, client_rules.rules, client_rules.leases, reachable);
        if leaves_lock_free {
            script = script.with_courtesy(scenario.courtesy);
        }
        let id = message.id;
        let reply = match message.payload {
            Payload::Acquire => Payload::AcquireReply(script.acquire(id, true)),
            Payload::Heartbeat => Payload::HeartbeatReply(script.heartbeat(id)),
            Payload::Renew(token) => Payload::RenewReply(token, script.renew(id, token)),
            Payload::End(token, tombstone, next) => {
                let (_, reply) = script.end(id, token, tombstone, next);
                world.over |= 1 << id;
                Payload::EndReply(next.map(|next| (next, reply)))
            }
            _ => return,
        };
        let (pushed, notified, evicted) = (script.pushed, script.notified, script.evicted);
        if leaves_lock_free && world.server.free == 0 {
            // No peer to be courteous to: the same as without.
            return;
        }
        world.faults.courtesies -= u8::from(leaves_lock_free);
        if !message.late {
            world.in_flight.push(Message { payload: reply, transit: 0, ..message });
        }
        if let Some((to, token)) = pushed
            && world.down & (1 << scenario.process(to)) == 0
        {
            let payload = Payload::Push(token);
            world.in_flight.push(Message { id: to, payload, age: 0, transit: 0, late: false });
        }
        if let Some((to, ticks)) = notified.filter(|_| scenario.timers.is_some()) {
            let payload = Payload::LeftFree(ticks);
            world.in_flight.push(Message { id: to, payload, age: 0, transit: 0, late: false });
        }
        let violation = self.violation_of(&world, evicted);
        let step = match leaves_lock_free {
            true => Step::LeaveFree(message),
            false => Step::Execute(message, counts_dead_subscribers),
        };
        self.add(step, world, violation);
    }

    /// What a script must not do, seen from before and after.
    fn violation_of(&self, after: &World, evicted: Option<Id>) -> Option<Violation> {
        if evicted.is_some_and(|id| self.claim(id).phase != Phase::Crashed) {
            return Some(Violation::LiveWaiterEvicted);
        }
        let before = &self.world.server;
        let holder = |lock: super::server::Lock| (lock.id, lock.token);
        let granted =
            after.server.lock.filter(|_| after.server.lock.map(holder) != before.lock.map(holder));
        if granted.is_some() && before.free > 0 && !before.queue.is_empty() {
            return Some(Violation::NotLeftFree);
        }
        granted.filter(|lock| lock.token <= before.fence).map(|_| Violation::TokenFell)
    }

    fn read(&mut self, at: usize) {
        let mut world = self.world.clone();
        let message = world.in_flight.swap_remove(at);
        let is_push = matches!(message.payload, Payload::Push(_) | Payload::LeftFree(_));
        if self.world.faults.lost_pushes > 0 && is_push {
            let mut lost = world.clone();
            lost.faults.lost_pushes -= 1;
            self.add(Step::LosePush(message), lost, None);
        }
        let client_rules = self.scenario.client_rules;
        let claim = &mut world.claims[usize::from(message.id)];
        match message.payload {
            Payload::AcquireReply(reply) | Payload::HeartbeatReply(reply) => {
                self.reply(claim, message.age, reply)
            }
            Payload::RenewReply(token, fine) => {
                claim.renewed(client_rules, message.age, token, fine)
            }
            Payload::Push(token) => {
                let before = *claim;
                claim.pushed(client_rules, token);
                self.set_timer(before, claim, message.age, None);
            }
            // C9: it looks when that is over.
            Payload::LeftFree(ticks) => match claim.phase {
                Phase::Waiting => claim.timer = claim.timer.min(ticks),
                _ => claim.notified = Some(ticks),
            },
            Payload::EndReply(next) => {
                if claim.phase == Phase::Ending {
                    claim.phase = Phase::Done;
                }
                if let Some((next, Some(reply))) = next {
                    let next = &mut world.claims[usize::from(next)];
                    if !matches!(next.phase, Phase::Ending | Phase::Done) {
                        self.reply(next, message.age, reply);
                    }
                }
            }
            _ => {}
        }
        self.add(Step::Read(message), world, None);
    }

    fn reply(&self, claim: &mut Claim, age: u8, reply: Reply) {
        let before = *claim;
        claim.on_reply(self.scenario.client_rules, age, reply);
        self.set_timer(before, claim, age, Some(reply));
    }

    /// C4 and C9: when the next heartbeat or renewal is due.
    fn set_timer(&self, before: Claim, claim: &mut Claim, age: u8, reply: Option<Reply>) {
        let Some(timers) = self.scenario.timers else { return };
        let leases = self.scenario.client_rules.leases;
        match (claim.phase, reply) {
            (Phase::Waiting, Some(Reply::Queued { position, left, .. })) => {
                let heartbeat_interval = match before.phase {
                    Phase::Waiting => claim.timer,
                    _ => timers.heartbeat_interval.saturating_sub(age),
                };
                let heartbeat_interval =
                    heartbeat_interval.min(claim.notified.take().unwrap_or(heartbeat_interval));
                // Without a lease before it there is no end to look at.
                claim.timer = if left > 0 {
                    heartbeat_interval.min(left + position)
                } else {
                    heartbeat_interval
                };
            }
            (Phase::Holding, _) if claim.token != before.token => {
                claim.timer = match reply {
                    Some(Reply::GrantedNow(_)) => (leases.ttl / 3).saturating_sub(age),
                    _ => claim.counted.saturating_sub(leases.f - leases.f / 3),
                };
            }
            _ => {}
        }
    }

    /// What may break, and be mended.
    fn fault_steps(&mut self, process: u8) {
        let bit = 1 << process;
        let of_process = |id: &Id| self.scenario.process(*id) == process;
        let phases = || self.scenario.ids().filter(of_process).map(|id| self.claim(id).phase);
        if phases().any(|phase| phase == Phase::Crashed) {
            return;
        }
        if self.world.down & bit != 0 {
            let mut world = World { down: self.world.down & !bit, ..self.world.clone() };
            // C8: who waits shows that it lives at once.
            let of_process = self.scenario.ids().filter(of_process).map(usize::from);
            of_process.for_each(|id| world.claims[id].timer = 0);
            return self.add(Step::Reconnect(process), world, None);
        }
        let watched = self.scenario.observed().is_some_and(|id| of_process(&id));
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
    fn cut(&mut self, process: u8, crashes_process: bool) {
        let scenario = self.scenario;
        let of_process = |id: Id| scenario.process(id) == process;
        let is_open = |message: &Message| {
            of_process(message.id) && !message.late && message.payload.is_request()
        };
        let open = self.world.in_flight.iter().filter(|message| is_open(message)).count() as u32;
        let choices = if scenario.late { 1_u32 << open } else { 1 };
        for kept in 0..choices {
            let mut world = self.world.clone();
            for id in scenario.ids().filter(|id| of_process(*id)) {
                let in_doubt = world.is_creating(id);
                let claim = &mut world.claims[usize::from(id)];
                match (crashes_process, claim.phase) {
                    (true, Phase::Done) => {}
                    (true, _) => claim.phase = Phase::Crashed,
                    // What it will be ended with was decided when its END went out.
                    (false, phase) => claim.dirty |= in_doubt && phase != Phase::Ending,
                }
            }
            let mut nth = 0;
            world.in_flight.retain_mut(|message| {
                if is_open(message) {
                    message.late = kept & (1 << nth) != 0;
                    nth += 1;
                    return message.late;
                }
                message.late || !of_process(message.id)
            });
            world.down |= 1 << process;
            let late = kept.count_ones();
            let step = match crashes_process {
                true => Step::Crash(process, late),
                false => Step::Cut(process, late),
            };
            world.faults.crashes -= u8::from(crashes_process);
            world.faults.cuts -= u8::from(!crashes_process);
            self.add(step, world, None);
        }
    }

    fn tick_step(&mut self) {
        if self.scenario.timers.is_some_and(|timers| self.is_urgent(timers)) {
            return;
        }
        let mut world = self.world.clone();
        world.server.tick();
        world.claims.iter_mut().for_each(Claim::tick);
        for message in &mut world.in_flight {
            message.age = message.age.saturating_add(1);
            message.transit = message.transit.saturating_add(1);
        }
        let mut violation = None;
        if let (Some(id), Some(timers)) = (self.scenario.observed(), self.scenario.timers) {
            let waits = self.claim(id).phase != Phase::Idle;
            let no_holder = !self.world.claims.iter().any(Claim::believes_it_holds);
            world.idle += u8::from(waits && no_holder);
            violation = (world.idle > timers.bound).then_some(Violation::WaitsTooLong);
        }
        self.add(Step::Tick, world, violation);
    }

    /// Whether something must happen before time may pass.
    fn is_urgent(&self, timers: Timers) -> bool {
        let arriving =
            self.world.in_flight.iter().any(|message| message.transit >= timers.max_transit);
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
            Phase::Waiting => claim.timer == 0 && self.may_send_heartbeat(id),
            Phase::Holding => claim.timer == 0 && self.renewals_in_flight(id) == 0,
            Phase::Ending => !self.end_in_flight(id),
        }
    }
}
