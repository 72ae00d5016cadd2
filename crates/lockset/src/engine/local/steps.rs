//! The steps that the verbs share: settling a name, admitting, burying, telling.
//!
//! Settling reads the holders and the first waiters only, however many wait.

use std::time::Duration;

use rusqlite::{OptionalExtension, params};

use super::SAFETY_NET;
use super::inbox::Letter;
use super::rows::{ClaimRow, id_at, int, optional, select_claims, seq_of, unsigned, written};
use super::store::{Post, Sql, Transaction};
use crate::clock::{nanos, wall_micros};
use crate::engine::common::admission::Tally;
use crate::engine::{Claim, Grant, Mode, drift};
use crate::error::{Error, LossReason};
use crate::name::Name;
use crate::token::Token;

/// A name whose last token is so old, and that nobody uses, is forgotten: the wall clock, which
/// every new token is not below, has long passed it.
const IDLE_MICROS: u64 = 7 * 86_400 * 1_000_000;
/// Smaller tokens come from a caller who answers for the clock; such a fence is kept for ever.
const CLOCK_TOKENS_FROM: u64 = 1_000_000_000_000_000;
/// One in so many new names looks at so many old ones; on average two for each.
const SWEEP_ONE_IN: u32 = 64;
const SWEEP_NAMES: i64 = 128;

/// Whoever waits for so long without having shown up has gone, if it is not seen to live.
const UNSEEN: Duration = Duration::from_secs(60);
/// A client that waits shows up so often at least.
const SHOW_UP: Duration = Duration::from_secs(20);
/// The sweep also takes waiters that have not shown up for so long.
const UNSEEN_FOR_LONG: Duration = Duration::from_secs(86_400);

/// A name after it was settled.
pub(super) struct Queue {
    /// `None`: the name has no row of its own yet.
    pub(super) fence: Option<u64>,
    /// There may be watchers.
    pub(super) watched: bool,
    pub(super) tally: Tally,
    pub(super) holders: Vec<ClaimRow>,
    /// The first waiter, which is not admitted.
    pub(super) refused: Option<ClaimRow>,
}

impl Queue {
    pub(super) fn mode_in_use(&self) -> Option<Mode> {
        self.holders.first().or(self.refused.as_ref()).map(|claim| claim.mode)
    }

    /// Whether some of the holders waited until now.
    pub(super) fn has_newly_admitted(&self) -> bool {
        self.holders.last().is_some_and(|last| last.expires.is_none())
    }

    pub(super) fn last_seq(&self) -> i64 {
        self.refused.as_ref().or(self.holders.last()).map_or(0, |claim| claim.seq)
    }
}

/// Where somebody waits.
pub(super) struct Place {
    /// The waiter before; `None`: there are only holders before.
    pub(super) before: Option<ClaimRow>,
    /// When it showed up last.
    pub(super) seen: Option<u64>,
}

/// The steps the verbs share.
impl Transaction<'_> {
    /// Drops the holders whose lease is over and the first waiters that have gone, and admits, in
    /// order, who fits behind the rest.
    pub(super) fn settle(&mut self, name: &Name) -> Sql<Queue> {
        let (mut queue, lapsed) = self.front(name)?;
        for claim in lapsed {
            self.delete(name, claim.seq)?;
            if claim.expires.is_none() {
                self.wake_waiter_after(name, claim.seq)?;
            }
        }
        if queue.has_newly_admitted() {
            self.admit(name, &mut queue)?;
        }
        self.watched = queue.watched;
        Ok(queue)
    }

    /// How a name is once it is settled, and whom that takes away.
    pub(super) fn front(&self, name: &Name) -> Sql<(Queue, Vec<ClaimRow>)> {
        let (mut fence, mut watched, mut tally) = (None, true, Tally::default());
        let (mut holders, mut refused, mut lapsed) = (Vec::<ClaimRow>::new(), None, Vec::new());
        let mut statement =
            self.db.prepare_cached(select_claims!("WHERE name = ?1 ORDER BY seq"))?;
        let mut rows = statement.query([name.as_str()])?;
        while let Some(row) = rows.next()? {
            if row.get::<_, i64>(0)? == 0 {
                fence = Some(unsigned(row, 1)?);
                watched = row.get(11)?;
                continue;
            }
            let claim = ClaimRow::read(row)?;
            match claim.expires {
                Some(expires) if !self.lasts(expires, claim.ttl) => {
                    lapsed.push(claim);
                    continue;
                }
                None if self.is_unseen(claim.seen, &claim.process) => {
                    lapsed.push(claim);
                    continue;
                }
                None if !tally.admits(claim.mode) => {
                    refused = Some(claim);
                    break;
                }
                _ => {}
            }
            tally.add(claim.mode);
            holders.push(claim);
        }
        Ok((Queue { fence, watched, tally, holders, refused }, lapsed))
    }

    /// Whether a lease still runs. One that ends later than a whole ttl from now was written before
    /// the machine booted, when its clock had come further.
    pub(super) fn lasts(&self, expires: u64, ttl: u64) -> bool {
        self.now < expires && expires <= self.now.saturating_add(ttl)
    }

    /// Whether one that waits has gone, as far as that can be known without seeing its process.
    pub(super) fn is_unseen(&self, seen: Option<u64>, process: &str) -> bool {
        match seen.unwrap_or(0) {
            // That was before the machine booted.
            seen if seen > self.now => true,
            seen => self.now - seen > nanos(UNSEEN) && !self.store.processes.is_alive(process),
        }
    }

    pub(super) fn must_show_up(&self, seen: Option<u64>) -> bool {
        self.now.saturating_sub(seen.unwrap_or(0)) >= nanos(SHOW_UP)
    }

    /// A client shows up with all its waiters for the name at a time, because it lives or dies with
    /// them; so they write once in a while, however many they are.
    pub(super) fn show_up(&mut self, name: &Name, seen: Option<u64>) -> Sql<()> {
        if !self.must_show_up(seen) {
            return Ok(());
        }
        self.db
            .prepare_cached(
                "UPDATE lock SET seen = ?1 WHERE name = ?2 AND seq > 0 AND expires IS NULL
                 AND inbox = ?3",
            )?
            .execute(params![int(self.now), name.as_str(), self.store.inbox.name()])
            .map(|_| ())
    }

    /// Grants the lock to those among `holders` that were waiting until now, and tells them.
    pub(super) fn admit(&mut self, name: &Name, queue: &mut Queue) -> Sql<()> {
        let mut fence = queue.fence.unwrap_or(0);
        for held in queue.holders.iter_mut().filter(|held| held.expires.is_none()) {
            let expires = self.now.saturating_add(held.ttl);
            fence = next_token(fence, held.floor).get();
            (held.token, held.expires) = (fence, Some(expires));
            self.db
                .prepare_cached(
                    "UPDATE lock SET token = ?1, expires = ?2 WHERE name = ?3 AND seq = ?4",
                )?
                .execute(params![int(fence), int(expires), name.as_str(), held.seq])?;
            self.post.push((held.inbox.clone(), Post::Letter(Letter::Look(held.id))));
        }
        // The next in line saw only the one before it; now all holders are its business. Of one
        // alone it learns soon enough by itself, unless that one's lease is too short for it.
        let short = queue.holders.iter().any(|held| held.ttl < nanos(SAFETY_NET));
        if let Some(first) = queue.refused.as_ref().filter(|_| short || queue.holders.len() > 1) {
            self.post.push((first.inbox.clone(), Post::Letter(Letter::Look(first.id))));
        }
        self.changed = true;
        self.set_fence(name, queue.fence, fence)?;
        queue.fence = Some(fence);
        Ok(())
    }

    pub(super) fn set_fence(&mut self, name: &Name, before: Option<u64>, fence: u64) -> Sql<()> {
        let sql = match before {
            Some(_) => "UPDATE lock SET token = ?2 WHERE name = ?1 AND seq = 0",
            None => "INSERT INTO lock (name, seq, token) VALUES (?1, 0, ?2)",
        };
        self.db.prepare_cached(sql)?.execute(params![name.as_str(), int(fence)])?;
        if before.is_none() && rand::random_ratio(1, SWEEP_ONE_IN) {
            self.sweep_idle_names(wall_micros().saturating_sub(IDLE_MICROS))?;
        }
        Ok(())
    }

    /// Goes on where the last sweep, of whichever process, ended.
    pub(super) fn sweep_idle_names(&mut self, older_than: u64) -> Sql<()> {
        let from: String = self.db.query_row("SELECT swept FROM home", [], |row| row.get(0))?;
        let last: Option<String> = self.db.query_row(
            "SELECT max(name) FROM (SELECT name FROM lock WHERE name > ?1 ORDER BY name LIMIT ?2)",
            params![from, SWEEP_NAMES],
            |row| row.get(0),
        )?;
        if let Some(last) = &last {
            // Claims are removed by who comes next; but nobody comes to a name that is not used any
            // more.
            self.db.execute(
                "DELETE FROM lock WHERE seq > 0 AND name > ?1 AND name <= ?2 AND CASE
                 WHEN expires IS NULL THEN seen > ?3 OR seen < ?4
                 ELSE expires <= ?3 OR expires - ttl > ?3 END",
                params![
                    from,
                    last,
                    int(self.now),
                    int(self.now.saturating_sub(nanos(UNSEEN_FOR_LONG)))
                ],
            )?;
            self.db.execute(
                "DELETE FROM lock WHERE seq = 0 AND name > ?1 AND name <= ?2 AND value IS NULL
                 AND token > ?3 AND token < ?4 AND version < ?4 AND NOT EXISTS
                 (SELECT 1 FROM lock AS claim WHERE claim.name = lock.name AND claim.seq > 0)",
                params![from, last, int(CLOCK_TOKENS_FROM), int(older_than)],
            )?;
        }
        self.db.execute("UPDATE home SET swept = ?1", [last.unwrap_or_default()]).map(|_| ())
    }

    pub(super) fn insert_holder(&mut self, claim: &Claim, queue: &Queue) -> Sql<Grant> {
        let seq = queue.last_seq() + 1;
        let token = next_token(queue.fence.unwrap_or(0), claim.floor.map(Token::get));
        let expires = self.now.saturating_add(nanos(claim.ttl));
        self.set_fence(&claim.name, queue.fence, token.get())?;
        self.insert(claim, seq, token.get(), Some(expires))?;
        self.tell_watchers(&claim.name)?;
        Ok(self.grant(seq, token, expires, claim.ttl))
    }

    pub(super) fn insert_waiter(&mut self, claim: &Claim) -> Sql<i64> {
        let seq = self
            .db
            .prepare_cached("SELECT max(seq) FROM lock WHERE name = ?1")?
            .query_row([claim.name.as_str()], |row| row.get::<_, Option<i64>>(0))?
            .unwrap_or(0)
            + 1;
        self.insert(claim, seq, 0, None).map(|()| seq)
    }

    pub(super) fn insert(
        &mut self,
        claim: &Claim,
        seq: i64,
        token: u64,
        expires: Option<u64>,
    ) -> Sql<()> {
        self.changed = true;
        self.db
            .prepare_cached(
                "INSERT INTO lock (name, seq, token, id, mode, ttl, floor, expires, revoked,
                 detached, process, inbox, by, note, seen)
                 VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, 0, ?9, ?10, ?11, ?12, ?13, ?14)",
            )?
            .execute(params![
                claim.name.as_str(),
                seq,
                int(token),
                claim.id.to_bits().to_be_bytes(),
                written(claim.mode),
                int(nanos(claim.ttl)),
                claim.floor.map(|floor| int(floor.get())),
                expires.map(int),
                claim.detachable,
                self.store.processes.recorded(),
                self.store.inbox.name(),
                &*claim.note.by,
                &*claim.note.text,
                expires.is_none().then_some(int(self.now)),
            ])
            .map(|_| ())
    }

    pub(super) fn delete(&mut self, name: &Name, seq: i64) -> Sql<()> {
        self.changed = true;
        self.db
            .prepare_cached("DELETE FROM lock WHERE name = ?1 AND seq = ?2")?
            .execute(params![name.as_str(), seq])
            .map(|_| ())
    }

    /// Where the claim is, and whether it holds. Reads all claims of the name; only who queues, or
    /// leaves without having held, comes here.
    pub(super) fn find(&self, claim: &Claim) -> Sql<Option<(i64, bool)>> {
        self.db
            .prepare_cached(
                "SELECT seq, expires IS NOT NULL FROM lock WHERE name = ?1 AND seq > 0 AND id = ?2",
            )?
            .query_row(params![claim.name.as_str(), claim.id.to_bits().to_be_bytes()], |row| {
                Ok((row.get(0)?, row.get(1)?))
            })
            .optional()
    }

    /// The claim's row, if it holds the lock by `grant`.
    pub(super) fn held(&self, claim: &Claim, grant: &Grant) -> Sql<Option<ClaimRow>> {
        let row = self.holding(claim, seq_of(grant))?;
        Ok(row.filter(|row| is_held_by(row, claim, grant)))
    }

    /// The claim's row at `seq`, if it is there and holds the lock.
    pub(super) fn holding(&self, claim: &Claim, seq: i64) -> Sql<Option<ClaimRow>> {
        let row = self
            .db
            .prepare_cached(select_claims!("WHERE name = ?1 AND seq = ?2 AND seq > 0"))?
            .query_row(params![claim.name.as_str(), seq], ClaimRow::read)
            .optional()?;
        let lasts = |row: &ClaimRow| row.expires.is_some_and(|ends| self.lasts(ends, row.ttl));
        Ok(row.filter(|row| row.id == claim.id && lasts(row)))
    }

    /// Where the claim waits, if it still does.
    pub(super) fn place_of(&self, claim: &Claim, seq: i64, queue: &Queue) -> Sql<Option<Place>> {
        if let Some(first) = queue.refused.as_ref().filter(|first| first.id == claim.id) {
            return Ok(Some(Place { before: None, seen: first.seen }));
        }
        let mut statement = self.db.prepare_cached(select_claims!(
            "WHERE name = ?1 AND seq > 0 AND seq <= ?2 ORDER BY seq DESC LIMIT 2"
        ))?;
        let mut rows = statement.query(params![claim.name.as_str(), seq])?;
        match rows.next()? {
            Some(row) if id_at(row, 2)? == claim.id => {
                let seen = optional(row, 10)?;
                let before = rows.next()?.map(ClaimRow::read).transpose()?;
                Ok(before.map(|before| Place { before: Some(before), seen }))
            }
            _ => Ok(None),
        }
    }

    /// Removes those whose processes died: the holders, and the first waiter.
    pub(super) fn bury_the_dead(&mut self, name: &Name, queue: &Queue) -> Sql<bool> {
        let mut any = false;
        for claim in queue.holders.iter().chain(&queue.refused) {
            any |= self.bury_if_dead(name, claim)?;
        }
        Ok(any)
    }

    pub(super) fn is_gone(&self, claim: &ClaimRow) -> bool {
        let dead = || self.store.processes.is_dead(&claim.process);
        match claim.expires {
            // A detached hold outlives its process; a wait does not.
            Some(_) => !claim.detached && dead(),
            None => dead() || self.is_unseen(claim.seen, &claim.process),
        }
    }

    pub(super) fn bury_if_dead(&mut self, name: &Name, claim: &ClaimRow) -> Sql<bool> {
        if !self.is_gone(claim) {
            return Ok(false);
        }
        self.delete(name, claim.seq)?;
        // Its client may live: another process can stand in for it.
        let letter = match claim.expires {
            Some(_) => Letter::Lost(claim.id, LossReason::Forgotten),
            None => Letter::Look(claim.id),
        };
        self.post.push((claim.inbox.clone(), Post::Letter(letter)));
        self.post.push((claim.inbox.clone(), Post::Bury));
        if claim.expires.is_none() {
            self.wake_waiter_after(name, claim.seq)?;
        }
        Ok(true)
    }

    /// Who waited behind one that is gone has another one to watch.
    pub(super) fn wake_waiter_after(&mut self, name: &Name, seq: i64) -> Sql<()> {
        let next = self
            .db
            .prepare_cached(
                "SELECT id, inbox FROM lock WHERE name = ?1 AND seq > ?2 AND expires IS NULL
                 ORDER BY seq LIMIT 1",
            )?
            .query_row(params![name.as_str(), seq], |row| Ok((id_at(row, 0)?, row.get(1)?)))
            .optional()?;
        if let Some((id, inbox)) = next {
            self.post.push((inbox, Post::Letter(Letter::Look(id))));
        }
        Ok(())
    }

    /// Writes to all who watch the name, if something changed.
    pub(super) fn tell_watchers(&mut self, name: &Name) -> Sql<()> {
        if !std::mem::take(&mut self.changed) || !self.watched {
            return Ok(());
        }
        let mut statement = self.db.prepare_cached("SELECT inbox, exact, scope FROM watcher")?;
        let mut rows = statement.query([])?;
        let mut told = Vec::new();
        while let Some(row) = rows.next()? {
            let (exact, scope) = (row.get(1)?, row.get_ref(2)?.as_str()?);
            let covers =
                if exact { name.as_str() == scope } else { name.as_str().starts_with(scope) };
            let inbox: String = row.get(0)?;
            if covers && !told.contains(&inbox) {
                told.push(inbox);
            }
        }
        let letters = told.into_iter().map(|i| (i, Post::Letter(Letter::Changed(name.clone()))));
        self.post.extend(letters);
        Ok(())
    }

    pub(super) fn grant_of(&self, held: &ClaimRow) -> Grant {
        let (token, ttl) = (Token::new(held.token), Duration::from_nanos(held.ttl));
        self.grant(held.seq, token, held.expires.unwrap_or(self.now), ttl)
    }

    /// Valid until shortly before it lapses: all processes of the machine share one clock.
    pub(super) fn grant(&self, seq: i64, token: Token, expires: u64, ttl: Duration) -> Grant {
        let valid_until = self.store.moment(expires).saturating_sub(drift(ttl));
        Grant { token, valid_until, key: seq.to_be_bytes().into() }
    }
}

pub(super) fn next_token(fence: u64, floor: Option<u64>) -> Token {
    Token::next(fence, floor.unwrap_or_else(wall_micros))
}

pub(super) fn is_held_by(row: &ClaimRow, claim: &Claim, grant: &Grant) -> bool {
    row.id == claim.id && row.token == grant.token.get()
}

pub(super) fn not_held(claim: &Claim) -> Error {
    Error::NotHeld { name: claim.name.clone() }
}
