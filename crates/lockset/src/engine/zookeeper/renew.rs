//! What happens while a lock is held: renewals, changes, what is said about it, and its loss.

use std::sync::Arc;
use std::time::Duration;

use futures_util::future::join_all;
use tokio::sync::{mpsc, oneshot};

use super::acquire::{Asking, Entry, Node};
use super::client::session::{Answered, Fault, Happening, PASSES, Session, failed};
use super::client::wire::{Change, Hello, Kind, Part, Refusal};
use super::record::{Key, Words};
use super::{Book, Core, MAIN, PATIENCE, Tag};
use crate::clock::Moment;
use crate::engine::{Claim, ClaimId, Event, Grant, Mode};
use crate::error::{Error, LossReason, Result};
use crate::name::Note;

/// How often leases that nobody renews are looked for, in parts of the session's timeout.
const LOOKS: u32 = 12;

/// What is to be asked about a claim when it is renewed.
struct Renewal {
    session: Arc<Session>,
    node: Node,
}

impl Core {
    /// One `sync` per session, whatever the number of its locks. A node is looked at when it is
    /// renewed for the first time on a connection; from then on a watch tells of changes, and its
    /// word comes before the answer to the `sync`.
    pub(super) async fn renew(&self, batch: &[(&Claim, &Grant)]) -> Vec<Result<Grant>> {
        let ours = join_all(batch.iter().map(|(claim, grant)| self.renewal(claim, grant))).await;
        let mut sessions: Vec<Arc<Session>> = Vec::new();
        for renewal in ours.iter().flatten() {
            if !sessions.iter().any(|session| Arc::ptr_eq(session, &renewal.session)) {
                sessions.push(renewal.session.clone());
            }
        }
        let synced: Vec<Answered<()>> = join_all(sessions.iter().map(|session| async {
            let first = session.sync(&self.paths.chroot).done().await;
            match first {
                // The session may have rested; if it is still there, this wakes it.
                Err(Fault::NotSent) => {
                    let ready = session.ready(self.clock.now() + PATIENCE).await;
                    // That no server answers ends nothing yet.
                    let ended = || session.status().ended;
                    ready.map_err(|_| if ended() { Fault::Ended } else { Fault::NotSent })?;
                    session.sync(&self.paths.chroot).done().await
                }
                first => first,
            }
        }))
        .await;
        self.heeded().await;
        join_all(batch.iter().zip(ours).map(|((claim, grant), renewal)| async {
            let renewal = renewal?;
            let session = sessions.iter().position(|one| Arc::ptr_eq(one, &renewal.session));
            let synced = session.and_then(|index| synced.get(index)).cloned();
            self.renewed(claim, grant, renewal, synced.unwrap_or(Err(Fault::NotSent))).await
        }))
        .await
    }

    /// Waits until the book says what has been told so far: a watch's word comes before the answer
    /// to a `sync`, but takes another way.
    async fn heeded(&self) {
        let (tell, heeded) = oneshot::channel();
        if self.happenings.send((MAIN, Happening::Heeded(tell))).is_ok() {
            // Nobody heeds anything any more when the engine is closed.
            let _ = heeded.await;
        }
    }

    async fn renewal(&self, claim: &Claim, grant: &Grant) -> Result<Renewal> {
        let forgotten = || Error::lost(&claim.name, LossReason::Forgotten);
        let known = {
            let book = self.book();
            book.entries.get(&claim.id).map(|entry| {
                let node = entry.node.clone().filter(|node| node.token == grant.token);
                let session = entry.session.clone();
                node.filter(|_| entry.lease.is_some()).map(|node| Renewal { session, node })
            })
        };
        match (known, grant.zookeeper_key()) {
            (Some(known), _) => known.ok_or_else(forgotten),
            (None, Some(Key { path, session: Some(session) })) => {
                // Before anything is done to the session: another may hold by it.
                let (words, _) = self.words_at(claim, grant, &path).await?;
                if self.claim_at(&path, &words) != Some(claim.id) {
                    return Err(forgotten());
                }
                self.attach(claim, Node { path, token: grant.token }, session).await
            }
            (None, _) => Err(forgotten()),
        }
    }

    /// Passes the lock of a ticket on to another claim: first the node says whose it is from now
    /// on, and only whoever has written that takes the session over.
    pub(super) async fn adopt(
        &self,
        claim: &Claim,
        grant: &Grant,
        successor: &Claim,
    ) -> Result<Grant> {
        let forgotten = || Error::lost(&claim.name, LossReason::Forgotten);
        let key = grant.zookeeper_key().ok_or_else(forgotten)?;
        let session = key.session.clone().ok_or_else(forgotten)?;
        let give_up = self.clock.now() + PATIENCE;
        loop {
            if self.book().withdrawn.contains(successor.id) {
                return Err(Error::NotHeld { name: claim.name.clone() });
            }
            let (mut words, version) = self.words_at(claim, grant, &key.path).await?;
            match self.claim_at(&key.path, &words) {
                Some(owner) if owner == successor.id => break,
                Some(owner) if owner == claim.id => {}
                _ => return Err(forgotten()),
            }
            words.pass_on(successor);
            match self.main.set_data(&key.path, &words.write(), version).done().await {
                Ok(()) => break,
                // Another was faster, or nobody knows: what is written decides.
                Err(fault) if fault.is(Refusal::BAD_VERSION) => {}
                Err(fault) if fault.is_passing() && self.clock.now() < give_up => {
                    self.ready().await?;
                }
                Err(fault) if fault.is(Refusal::NO_NODE) => return Err(forgotten()),
                Err(fault) => return Err(fault.into()),
            }
        }
        let ours = {
            let mut book = self.book();
            if book.entries.contains_key(&successor.id) {
                return Ok(grant.clone());
            }
            book.withdrawn.insert(claim.id, self.clock.now());
            book.take(claim.id).filter(|entry| !entry.session.status().ended)
        };
        let node = Node { path: key.path, token: grant.token };
        match ours {
            // Detached by this very client, which has the session already.
            Some(Entry { session, tag, .. }) => {
                self.take_over(successor, node, session, tag).await?;
            }
            None => drop(self.attach(successor, node, session).await?),
        }
        Ok(grant.clone())
    }

    /// What the node of a held lock says, and its version.
    async fn words_at(&self, claim: &Claim, grant: &Grant, path: &str) -> Result<(Words, i32)> {
        let forgotten = || Error::lost(&claim.name, LossReason::Forgotten);
        if !path.starts_with(&format!("{}/", self.paths.lock(&claim.name)?)) {
            return Err(forgotten());
        }
        self.ready().await?;
        let (sync, data) = (self.main.sync(path), self.main.data(path, false));
        sync.done().await?;
        let (data, stat) = match data.data().await {
            Err(fault) if fault.is(Refusal::NO_NODE) => return Err(forgotten()),
            found => found?,
        };
        let words = Words::read(&data).filter(|words| words.token(stat.czxid) == grant.token);
        words.map(|words| (words, stat.version)).ok_or_else(forgotten)
    }

    /// The claim that holds by the node at `path`.
    fn claim_at(&self, path: &str, words: &Words) -> Option<ClaimId> {
        let first = self.layout.claim_of(path.rsplit('/').next()?)?;
        Some(words.claim(first))
    }

    /// Takes over the session that a ticket speaks of.
    async fn attach(
        &self,
        claim: &Claim,
        node: Node,
        (id, password): (i64, Vec<u8>),
    ) -> Result<Renewal> {
        let timeout_ms = i32::try_from(claim.ttl.as_millis()).unwrap_or(i32::MAX);
        let hello = Hello { seen: 0, timeout_ms, session: id, password };
        let tag = self.new_tag();
        let session = self.start_session(hello, tag);
        self.take_over(claim, node, session, tag).await
    }

    async fn take_over(
        &self,
        claim: &Claim,
        node: Node,
        session: Arc<Session>,
        tag: Tag,
    ) -> Result<Renewal> {
        session.rest();
        if let Err(error) = session.ready(self.clock.now() + PATIENCE).await {
            return match session.status().ended {
                true => Err(Error::lost(&claim.name, LossReason::SessionEnded)),
                false => Err(error),
            };
        }
        let entry = Entry {
            session: session.clone(),
            tag,
            epoch: session.status().epoch,
            node: Some(node.clone()),
            lease: Some(session.trusted_until()),
            watched_on: 0,
            says_it_waits: false,
            moving: None,
        };
        self.book().entries.insert(claim.id, entry);
        Ok(Renewal { session, node })
    }

    async fn renewed(
        &self,
        claim: &Claim,
        grant: &Grant,
        renewal: Renewal,
        synced: Answered<()>,
    ) -> Result<Grant> {
        let Renewal { session, node } = renewal;
        if let Err(fault) = synced {
            let ended = session.status().ended || matches!(fault, Fault::Ended);
            return Err(match ended {
                true => Error::lost(&claim.name, LossReason::SessionEnded),
                false => fault.into(),
            });
        }
        // Asked behind the `sync`, which may have had to wait for another connection.
        let connection = session.status().connection;
        let watched_on = self.book().entries.get(&claim.id).map(|entry| entry.watched_on);
        if watched_on != Some(connection) {
            self.look_at_held(claim, grant, &session, node.path).await?;
        }
        let valid_until = session.lease_from(self.clock.now());
        // Asked after the trust, which is thus not that of a later session: this task may have
        // slept for long.
        let now = session.status().epoch;
        let path = match self.book().entries.get_mut(&claim.id) {
            Some(Entry { epoch, .. }) if *epoch != now => {
                return Err(Error::lost(&claim.name, LossReason::SessionEnded));
            }
            // A downgrade may have moved it while we asked.
            Some(Entry { lease, node: Some(node), .. }) => {
                // A slower renewal at the same time must not take back what was promised.
                *lease = (*lease).max(Some(valid_until));
                node.path.clone()
            }
            // It was lost while we asked.
            _ => return Err(Error::lost(&claim.name, LossReason::Broken)),
        };
        let session = grant.zookeeper_key().and_then(|key| key.session);
        Ok(Grant { token: grant.token, valid_until, key: Key { path, session }.write() })
    }

    /// Looks whether the node is there and watches it. A downgrade may move it meanwhile, or may
    /// have moved it without anybody knowing.
    async fn look_at_held(
        &self,
        claim: &Claim,
        grant: &Grant,
        session: &Session,
        at_first: String,
    ) -> Result<()> {
        let lost = |reason| {
            self.book().take(claim.id);
            Err(Error::lost(&claim.name, reason))
        };
        let (connection, mut path) = (session.status().connection, at_first.clone());
        let (data, stat) = loop {
            self.book().watched.insert(path.clone(), claim.id);
            let fault = match session.data(&path, true).data().await {
                Ok(found) => break found,
                Err(fault) => fault,
            };
            if !fault.is(Refusal::NO_NODE) {
                return Err(fault.into());
            }
            let elsewhere = {
                let mut book = self.book();
                book.watched.remove(&path);
                book.entries.get(&claim.id).and_then(|entry| entry.elsewhere(&path))
            };
            match elsewhere {
                Some(other) if path == at_first => path = other,
                _ => return lost(LossReason::Broken),
            }
        };
        let words = Words::read(&data);
        // What others wrote there says nothing about the lock: the path is the claim's.
        let another = |words: &Words| {
            let is_its = self.claim_at(&path, words) == Some(claim.id);
            words.token(stat.czxid) != grant.token || !is_its
        };
        if stat.owner != session.id() || words.as_ref().is_some_and(another) {
            return lost(LossReason::Forgotten);
        }
        if words.is_some_and(|words| words.revoked) {
            return Err(Error::lost(&claim.name, LossReason::Revoked));
        }
        let mut book = self.book();
        if path != at_first {
            book.moved(claim.id, &path);
        }
        // What moves is looked at again.
        if let Some(entry) = book.entries.get_mut(&claim.id)
            && entry.sure_path().is_some_and(|sure| sure == path)
        {
            entry.watched_on = connection;
        }
        Ok(())
    }

    /// The claim's own node, if it holds the lock.
    fn held(&self, claim: &Claim, grant: &Grant) -> Result<(Arc<Session>, Tag, Node)> {
        let book = self.book();
        let entry = book.entries.get(&claim.id).filter(|entry| entry.lease.is_some());
        let held = entry.and_then(|entry| {
            let node = entry.node.clone().filter(|node| node.token == grant.token)?;
            Some((entry.session.clone(), entry.tag, node))
        });
        held.ok_or_else(|| Error::lost(&claim.name, LossReason::Forgotten))
    }

    /// A reader's node with the same number takes the place of the writer's, as in Curator; it says
    /// which token it goes by. Until it is known that it did, the book says that it may have.
    pub(super) async fn downgrade(&self, claim: &Claim, grant: &Grant) -> Result<Grant> {
        let (session, tag, node) = self.held(claim, grant)?;
        let lost = || Error::lost(&claim.name, LossReason::Forgotten);
        let number = self.layout.place(node.name()).map(|place| place.number().to_owned());
        let prefix = self.layout.node_prefix(claim.id, Mode::Shared);
        let path = format!("{}/{prefix}{}", node.parent(), number.ok_or_else(lost)?);
        let data = Words::of(claim).with_token(grant.token).write();
        let parts = [
            Part::Create { path: path.clone(), data, acl: self.acl, kind: Kind::Ephemeral },
            Part::Delete { path: node.path.clone(), version: -1 },
        ];
        // One that was given up may have been done, and found by a renewal.
        if node.path != path {
            self.change_nodes(claim, &session, &parts, &path).await?;
        }
        if !self.book().moved(claim.id, &path) {
            return Err(lost());
        }
        let detached = tag != MAIN && claim.detachable;
        let key = Key { path, session: detached.then(|| session.credentials()) };
        Ok(Grant { key: key.write(), ..grant.clone() })
    }

    /// Does what moves a claim's node to `path`, once.
    async fn change_nodes(
        &self,
        claim: &Claim,
        session: &Session,
        parts: &[Part],
        path: &str,
    ) -> Result<()> {
        let lost = || Error::lost(&claim.name, LossReason::Forgotten);
        loop {
            let moving = {
                // Sent while the book is open, so that whoever takes the claim out erases later.
                let mut book = self.book();
                let entry = book.entries.get_mut(&claim.id).ok_or_else(lost)?;
                entry.moving = Some(path.to_owned());
                session.multi(parts)
            };
            match moving.transaction().await {
                Ok(_) | Err(Fault::Refused(Refusal::NODE_EXISTS)) => return Ok(()),
                Err(Fault::Refused(Refusal::NO_NODE)) => {
                    self.book().take(claim.id);
                    return Err(lost());
                }
                // Not known, so asked again: it can be done only once.
                Err(Fault::Unknown) => {
                    session.ready(self.clock.now() + PATIENCE).await?;
                    session.sync(path).done().await?;
                }
                Err(fault) => return Err(fault.into()),
            }
        }
    }

    pub(super) async fn set_note(&self, claim: &Claim, grant: &Grant, note: Note) -> Result<Grant> {
        let (session, _, node) = self.held(claim, grant)?;
        let say =
            async |path: &str| edit(&session, path, |words| words.set_note(note.clone())).await;
        let mut said = say(&node.path).await;
        if said.as_ref().is_err_and(|fault| fault.is(Refusal::NO_NODE)) {
            let entry = |book: &Book| book.entries.get(&claim.id)?.elsewhere(&node.path);
            let elsewhere = entry(&self.book());
            if let Some(path) = elsewhere {
                said = say(&path).await;
            }
        }
        match said {
            Ok(()) => Ok(grant.clone()),
            Err(fault) if fault.is(Refusal::NO_NODE) => {
                Err(Error::lost(&claim.name, LossReason::Forgotten))
            }
            Err(fault) => Err(fault.into()),
        }
    }

    /// Says at the node that its claim waits, so that those behind it need not watch all holders.
    pub(super) async fn say_waiting(&self, asking: &Asking<'_>, node: &Node) -> Answered<()> {
        let says_it = |entry: &mut Entry| std::mem::replace(&mut entry.says_it_waits, true);
        if self.book().entries.get_mut(&asking.claim.id).is_none_or(says_it) {
            return Ok(());
        }
        let said = edit(&asking.session, &node.path, |words| words.admitted = Some(false)).await;
        match said {
            // The list will tell that it is gone.
            Err(fault) if fault.is(Refusal::NO_NODE) => Ok(()),
            // It may have been written all the same, so it must be taken back in the end. If it
            // was not, nothing is lost: those behind then watch the whole line.
            said => said,
        }
    }

    /// Says in the background that the claim no longer waits, until it is heard.
    pub(super) fn say_admitted(&self, session: &Arc<Session>, path: String) {
        let (session, epoch) = (session.clone(), session.status().epoch);
        self.runtime.spawn(async move {
            loop {
                match edit(&session, &path, |words| words.admitted = Some(true)).await {
                    Err(fault) if fault.is_passing() => tokio::time::sleep(PASSES).await,
                    Ok(()) | Err(_) => return,
                }
                match session.ready(Moment::NEVER).await {
                    Ok(status) if status.epoch == epoch => {}
                    _ => return,
                }
            }
        });
    }

    /// Tells the keeper, which may have ended.
    fn signal(&self, signal: Event) {
        let _ = self.tell.send(signal);
    }

    fn held_in(&self, tag: Tag) -> Vec<ClaimId> {
        let book = self.book();
        let held = book.entries.iter().filter(|(_, entry)| entry.tag == tag);
        held.filter(|(_, entry)| entry.lease.is_some()).map(|(id, _)| *id).collect()
    }

    /// The session is over, and everything that stood in it.
    fn ended(&self, tag: Tag, epoch: u64) {
        let mut book = self.book();
        let over: Vec<ClaimId> = book
            .entries
            .iter()
            .filter(|(_, entry)| entry.tag == tag && entry.epoch <= epoch)
            .map(|(id, _)| *id)
            .collect();
        for id in over {
            if book.take(id).is_some_and(|entry| entry.lease.is_some()) {
                self.signal(Event::Lost(id, LossReason::SessionEnded));
            }
        }
    }

    /// Leases that would outlast a session that is kept for a shorter time now are over: what was
    /// promised cannot be kept.
    fn shortened(&self, tag: Tag) {
        let held = self.held_in(tag);
        let mut book = self.book();
        for id in held {
            let outlasts = |entry: &Entry| entry.lease > Some(entry.session.trusted_until());
            if book.entries.get(&id).is_some_and(outlasts)
                && let Some(entry) = book.take(id)
            {
                self.signal(Event::Lost(id, LossReason::SessionEnded));
                self.erase_entry(id, entry);
            }
        }
    }

    /// A node that was held has changed: it is gone, or says something new.
    fn touched(self: &Arc<Self>, change: Change, path: &str) {
        let mut book = self.book();
        let Some(id) = book.watched.get(path).copied() else { return };
        let held = book.entries.get(&id).is_some_and(|entry| entry.lease.is_some());
        if change == Change::Deleted {
            // A downgrade deletes it as well; the next renewal looks where it is.
            book.watched.remove(path);
            if let Some(entry) = book.entries.get_mut(&id)
                && entry.elsewhere(path).is_some()
            {
                entry.watched_on = 0;
                return;
            }
            book.take(id);
            if held {
                self.signal(Event::Lost(id, LossReason::Broken));
            }
            return;
        }
        let Some(entry) = book.entries.get(&id) else { return };
        let (session, path, core) = (entry.session.clone(), path.to_owned(), self.clone());
        self.runtime.spawn(async move {
            // If it cannot be read now, the next renewal looks.
            let said = session.data(&path, true).data().await;
            match said {
                Ok((data, _)) if Words::read(&data).is_some_and(|words| words.revoked) => {
                    core.signal(Event::Lost(id, LossReason::Revoked));
                }
                Ok(_) => {}
                Err(_) => {
                    if let Some(entry) = core.book().entries.get_mut(&id) {
                        entry.watched_on = 0;
                    }
                }
            }
        });
    }
}

/// Changes what a node of ours says.
pub(super) async fn edit(
    session: &Session,
    path: &str,
    change: impl Fn(&mut Words),
) -> Answered<()> {
    loop {
        let (data, stat) = session.data(path, false).data().await?;
        // What is not ours cannot be there: the path bears our claim's id.
        let Some(mut words) = Words::read(&data) else {
            return Err(Fault::Refused(Refusal::NO_NODE));
        };
        change(&mut words);
        match session.set_data(path, &words.write(), stat.version).done().await {
            Err(fault) if fault.is(Refusal::BAD_VERSION) => {}
            done => return done,
        }
    }
}

/// Hands what happens to whom it concerns.
pub(super) async fn heed_all(
    core: Arc<Core>,
    mut happenings: mpsc::UnboundedReceiver<(Tag, Happening)>,
) {
    while let Some((tag, happening)) = happenings.recv().await {
        match happening {
            Happening::Changed(change, path) => {
                core.touched(change, &path);
                core.observers.changed(&core, &path);
            }
            Happening::Cut => {
                let doubted = core.held_in(tag);
                doubted.into_iter().for_each(|id| core.signal(Event::Doubt(id)));
            }
            Happening::Shortened => core.shortened(tag),
            Happening::Expired(epoch) => core.ended(tag, epoch),
            Happening::Connected if tag == MAIN => core.observers.reconnected(&core),
            Happening::Connected => {}
            // Whoever asked may have gone.
            Happening::Heeded(tell) => drop(tell.send(())),
        }
    }
}

/// Ends the leases that nobody renews: the session would keep their nodes for ever.
pub(super) async fn end_leases(core: Arc<Core>) {
    loop {
        let pause = (core.timeout / LOOKS).max(Duration::from_millis(10));
        core.clock.sleep_until(core.clock.now() + pause).await;
        let now = core.clock.now();
        let over: Vec<(ClaimId, Entry)> = {
            let mut book = core.book();
            let is_over = |entry: &Entry| entry.lease.is_some_and(|lease| lease <= now);
            let over: Vec<ClaimId> = book
                .entries
                .iter()
                .filter(|(_, entry)| is_over(entry))
                .map(|(id, _)| *id)
                .collect();
            over.into_iter().filter_map(|id| Some((id, book.take(id)?))).collect()
        };
        for (id, entry) in over {
            // A session of its own ends by itself, unless a ticket's owner renews it elsewhere.
            if entry.tag == MAIN {
                core.erase_entry(id, entry);
            }
        }
    }
}

/// What an operator cannot ask of others.
pub(super) fn cannot_ask() -> Error {
    failed(
        "a holder that is not lockset cannot be asked to give the lock back; break it at once, or \
         end its session"
            .to_owned(),
        false,
    )
}
