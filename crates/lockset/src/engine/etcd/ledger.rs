//! What this client knows of its claims: their keys and leases, and which keys are to be removed.

use std::sync::Arc;
use std::time::Duration;

use super::keys::EtcdLayout;
use super::leases::EtcdLease;
use crate::clock::Moment;
use crate::engine::common::tombstones::Tombstones;
use crate::engine::{Claim, ClaimId};
use crate::hash::FastMap;
use crate::name::Name;
use crate::token::Token;

/// How often maintenance tries to remove the key of a claim that lapsed. Each attempt takes up to
/// `REQUEST_TIMEOUT` (2 s); this must be longer.
const REMOVAL_INTERVAL: Duration = Duration::from_millis(2500);

/// How long after the end of its own lease a claim is withdrawn by its caller; longer than
/// `CLEANUP_TIMEOUT` of the client and one attempt.
const OWN_REMOVAL_MARGIN: Duration = Duration::from_secs(15);

/// Maximum reusable keys per name, and maximum names with reusable keys.
const MAX_KEYS_PER_NAME: usize = 4;
const MAX_NAMES: usize = 4096;

/// All claims of a client that may have a key.
#[derive(Debug, Default)]
pub(super) struct ClaimLedger {
    entries: FastMap<ClaimId, LedgerEntry>,
    /// Claims that are over and whose keys may still exist.
    removals: FastMap<ClaimId, LedgerEntry>,
    withdrawn: Tombstones,
    /// Keys on shared leases that are certainly deleted, for the next claims on their names. Each
    /// with the id of its lease.
    reusable_keys: FastMap<Name, Vec<(i64, Vec<u8>)>>,
}

/// A claim that may have a key.
#[derive(Clone, Debug)]
pub(super) struct LedgerEntry {
    pub(super) name: Name,
    pub(super) key: Vec<u8>,
    pub(super) lease: Arc<EtcdLease>,
    /// The token by which the claim holds, if it does.
    pub(super) token: Option<Token>,
    /// A request that creates the key was not answered, so the claim ends with a tombstone.
    pub(super) create_is_in_doubt: bool,
    /// How many calls wait for the grant.
    callers: u32,
    /// The claim is over then unless a call waits for it or it is renewed, although its lease may
    /// live on. Of a claim that is over: when maintenance tries to remove its key.
    lapses_at: Moment,
    /// Another process may renew the claim: then only its lease ends it.
    pub(super) is_detachable: bool,
}

/// The removals that are due.
#[derive(Debug, Default)]
pub(super) struct DueRemovals {
    pub(super) removals: Vec<(ClaimId, LedgerEntry)>,
    /// When the next removal is due.
    pub(super) next_at: Option<Moment>,
}

impl ClaimLedger {
    pub(super) fn find(&self, id: ClaimId) -> Option<&LedgerEntry> {
        self.entries.get(&id)
    }

    /// Adds a claim, with a reusable key if there is one. An existing entry stays as it is.
    pub(super) fn insert(
        &mut self,
        claim: &Claim,
        lease: &Arc<EtcdLease>,
        layout: &EtcdLayout,
        now: Moment,
    ) {
        let reusable_keys = &mut self.reusable_keys;
        self.entries.entry(claim.id).or_insert_with(|| LedgerEntry {
            name: claim.name.clone(),
            key: take_reusable_key(reusable_keys, claim, lease)
                .unwrap_or_else(|| layout.claim(&claim.name, lease.id, claim.id)),
            lease: lease.clone(),
            token: None,
            create_is_in_doubt: false,
            callers: 0,
            lapses_at: now + lease.ttl,
            is_detachable: claim.detachable,
        });
    }

    /// Adds a claim that holds already, by a key that another process may have created.
    pub(super) fn insert_held(
        &mut self,
        claim: &Claim,
        key: Vec<u8>,
        lease: &Arc<EtcdLease>,
        token: Token,
        now: Moment,
    ) {
        let entry = LedgerEntry {
            name: claim.name.clone(),
            key,
            lease: lease.clone(),
            token: Some(token),
            create_is_in_doubt: false,
            callers: 0,
            lapses_at: now + claim.ttl,
            is_detachable: claim.detachable,
        };
        self.entries.insert(claim.id, entry);
    }

    /// Removes a claim that has no key any more.
    pub(super) fn remove(&mut self, id: ClaimId) -> Option<LedgerEntry> {
        self.entries.remove(&id)
    }

    /// Removes a claim whose key another claim owns now.
    pub(super) fn remove_transferred(&mut self, id: ClaimId, now: Moment) {
        self.entries.remove(&id);
        self.withdrawn.insert(id, now);
    }

    /// Whether no request may be sent for this claim any more.
    pub(super) fn is_withdrawn(&self, id: ClaimId) -> bool {
        self.withdrawn.contains(id)
    }

    /// Counts a call that waits for the claim's grant.
    pub(super) fn add_caller(&mut self, id: ClaimId) {
        if let Some(entry) = self.entries.get_mut(&id) {
            entry.callers += 1;
        }
    }

    /// A call no longer waits. If it was the last, the claim lapses unless another call follows.
    pub(super) fn remove_caller(&mut self, id: ClaimId, now: Moment) {
        if let Some(entry) = self.entries.get_mut(&id) {
            entry.callers = entry.callers.saturating_sub(1);
            if entry.callers == 0 && entry.token.is_none() {
                entry.lapses_at = now + entry.lease.ttl;
            }
        }
    }

    /// Whether a request that creates this claim's key was not answered.
    pub(super) fn create_is_in_doubt(&self, id: ClaimId) -> bool {
        self.find(id).is_some_and(|entry| entry.create_is_in_doubt)
    }

    /// A request that creates this claim's key is about to be sent: it is in doubt until it is
    /// answered. Returns whether it was in doubt before; `None` if it must not be sent.
    pub(super) fn mark_create_sent(&mut self, id: ClaimId) -> Option<bool> {
        if self.withdrawn.contains(id) {
            return None;
        }
        let entry = self.entries.get_mut(&id)?;
        Some(std::mem::replace(&mut entry.create_is_in_doubt, true))
    }

    /// The request of `mark_create_sent` is over.
    pub(super) fn set_create_in_doubt(&mut self, id: ClaimId, is_in_doubt: bool) {
        if let Some(entry) = self.entries.get_mut(&id) {
            entry.create_is_in_doubt = is_in_doubt;
        }
    }

    /// The claim holds, until `lapses_at` if it is not renewed. Returns false if it has lapsed or
    /// was withdrawn in the meantime: then its key is gone or about to be removed.
    #[must_use]
    pub(super) fn set_held(&mut self, id: ClaimId, token: Token, lapses_at: Moment) -> bool {
        let Some(entry) = self.entries.get_mut(&id) else { return false };
        entry.token = Some(token);
        entry.lapses_at = lapses_at;
        true
    }

    /// Keeps the key of a removed entry for the next claim on its name. The key must not exist, and
    /// no request that could create or delete it may be under way.
    pub(super) fn keep_key_for_reuse(&mut self, entry: LedgerEntry) {
        if entry.create_is_in_doubt || !entry.lease.is_shared || entry.lease.is_gone() {
            return;
        }
        if self.reusable_keys.len() >= MAX_NAMES && !self.reusable_keys.contains_key(&entry.name) {
            self.reusable_keys.clear();
        }
        let keys = self.reusable_keys.entry(entry.name).or_default();
        if keys.len() >= MAX_KEYS_PER_NAME {
            keys.remove(0);
        }
        keys.push((entry.lease.id, entry.key));
    }

    /// Withdraws a claim: no request is sent for it any more. The caller removes its key, and
    /// withdraws it again if that fails. It gives up when the claim's own lease is long over: then
    /// maintenance ends the removal.
    pub(super) fn withdraw(&mut self, id: ClaimId, now: Moment) -> Option<LedgerEntry> {
        self.withdrawn.insert(id, now);
        if let Some(entry) = self.entries.remove(&id) {
            let lapses_at = match entry.lease.is_shared {
                true => Moment::NEVER,
                false => now + entry.lease.ttl + OWN_REMOVAL_MARGIN,
            };
            self.removals.insert(id, LedgerEntry { lapses_at, ..entry });
        }
        self.removals.get(&id).cloned()
    }

    /// The claim is over although no caller withdraws it: maintenance removes its key.
    pub(super) fn lapse(&mut self, id: ClaimId, now: Moment) {
        if let Some(entry) = self.entries.get_mut(&id) {
            entry.lapses_at = now;
        }
    }

    pub(super) fn is_being_removed(&self, id: ClaimId) -> bool {
        self.removals.contains_key(&id)
    }

    /// The key was removed.
    pub(super) fn finish_removal(&mut self, id: ClaimId) {
        self.removals.remove(&id);
    }

    /// The removals to try now: of claims that lapsed, and those that failed before.
    pub(super) fn take_due_removals(&mut self, now: Moment) -> DueRemovals {
        let lapsed: Vec<ClaimId> = self
            .entries
            .iter()
            .filter(|(_, entry)| entry.callers == 0 && entry.lapses_at <= now)
            .map(|(id, _)| *id)
            .collect();
        let mut due = DueRemovals::default();
        for id in lapsed {
            if let Some(entry) = self.entries.remove(&id).filter(|entry| !entry.is_detachable) {
                // A later request would create a key that is then deleted while the claim holds.
                self.withdrawn.insert(id, now);
                self.removals.insert(id, entry);
            }
        }
        for (id, entry) in &mut self.removals {
            if entry.lapses_at <= now {
                entry.lapses_at = now + REMOVAL_INTERVAL;
                due.removals.push((*id, entry.clone()));
            }
        }
        let lapsing = self.entries.values().filter(|entry| entry.callers == 0);
        due.next_at = lapsing.chain(self.removals.values()).map(|entry| entry.lapses_at).min();
        due
    }

    /// The leases that waiting claims have for themselves.
    pub(super) fn own_leases_of_waiters(&self) -> Vec<Arc<EtcdLease>> {
        let waiting =
            self.entries.values().filter(|entry| entry.callers > 0 && entry.token.is_none());
        waiting.map(|entry| entry.lease.clone()).filter(|lease| !lease.is_shared).collect()
    }

    /// Whether a claim may have a key on this lease.
    pub(super) fn uses_lease(&self, lease: &Arc<EtcdLease>) -> bool {
        let mut entries = self.entries.values().chain(self.removals.values());
        entries.any(|entry| Arc::ptr_eq(&entry.lease, lease))
    }

    /// The claims that hold by this lease.
    pub(super) fn holders_on(&self, lease: &Arc<EtcdLease>) -> Vec<ClaimId> {
        let held = self.entries.iter().filter(|(_, entry)| entry.token.is_some());
        held.filter(|(_, entry)| Arc::ptr_eq(&entry.lease, lease)).map(|(id, _)| *id).collect()
    }

    /// Removes all claims on a lease that is gone, and their keys with it. Returns those that held.
    pub(super) fn remove_claims_on(&mut self, lease: &Arc<EtcdLease>) -> Vec<ClaimId> {
        let holders = self.holders_on(lease);
        self.entries.retain(|_, entry| !Arc::ptr_eq(&entry.lease, lease));
        holders
    }

    /// How long this claim lasts if it is not renewed.
    pub(super) fn time_left(&self, id: ClaimId, now: Moment) -> Option<Duration> {
        let entry = self.entries.get(&id)?;
        let until = entry.lapses_at.min(entry.lease.valid_until());
        Some(until.saturating_duration_since(now))
    }
}

/// A reusable key of the claim's name on this lease, if there is one.
fn take_reusable_key(
    reusable_keys: &mut FastMap<Name, Vec<(i64, Vec<u8>)>>,
    claim: &Claim,
    lease: &EtcdLease,
) -> Option<Vec<u8>> {
    let keys = reusable_keys.get_mut(&claim.name).filter(|_| lease.is_shared)?;
    let position = keys.iter().position(|(id, _)| *id == lease.id)?;
    Some(keys.swap_remove(position).1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_claim_that_lapsed_neither_holds_nor_is_created_again() {
        let at = |secs: u64| Moment::from_nanos(secs * 1_000_000_000);
        let ttl = Duration::from_secs(3);
        let (claim, layout) = (Claim::plain("lapsed", ttl), EtcdLayout::new("p", false));
        let (mut ledger, lease) = (ClaimLedger::default(), EtcdLease::new(1, ttl, true, at(100)));
        ledger.insert(&claim, &lease, &layout, at(100));
        assert!(ledger.set_held(claim.id, Token::new(1), at(103)));
        assert!(ledger.take_due_removals(at(102)).removals.is_empty());
        assert_eq!(ledger.take_due_removals(at(104)).removals.len(), 1);
        assert!(!ledger.set_held(claim.id, Token::new(1), at(110)), "its key is being deleted");
        ledger.finish_removal(claim.id);
        ledger.insert(&claim, &lease, &layout, at(105));
        assert_eq!(ledger.mark_create_sent(claim.id), None, "a late request of it is not sent");
    }

    #[test]
    fn a_withdrawal_that_its_caller_gave_up_is_not_kept_for_ever() {
        let at = |secs: u64| Moment::from_nanos(secs * 1_000_000_000);
        let (ttl, layout) = (Duration::from_secs(3), EtcdLayout::new("p", false));
        for is_shared in [false, true] {
            let claim = Claim { detachable: !is_shared, ..Claim::plain("given-up", ttl) };
            let mut ledger = ClaimLedger::default();
            ledger.insert(&claim, &EtcdLease::new(1, ttl, is_shared, at(100)), &layout, at(100));
            assert!(ledger.withdraw(claim.id, at(101)).is_some());
            let soon = ledger.take_due_removals(at(110));
            assert!(soon.removals.is_empty(), "its caller still withdraws it");
            let later = ledger.take_due_removals(at(120));
            assert_eq!(later.removals.len(), usize::from(!is_shared));
            assert_eq!(soon.next_at, Some(if is_shared { Moment::NEVER } else { at(119) }));
        }
    }
}
