//! The way of one claim: its node, its place in the queue, and its end.

use std::sync::Arc;

use super::admission::{Verdict, WaitFor, judge};
use super::client::session::{Answer, Answered, Fault, PASSES, Session, Watching, failed};
use super::client::wire::{Hello, Kind, Refusal};
use super::layout::number_of;
use super::record::{Key, Words, token_of};
use super::release::{Unsure, gone};
use super::{Book, Core, ENGINE, MAIN, PATIENCE, Tag, at_most, new_session, no_fence, teller};
use crate::clock::Moment;
use crate::engine::common::admission::check_permits;
use crate::engine::{Claim, ClaimId, Grant, Mode, Wait, trusted_until};
use crate::error::{Error, Result};
use crate::token::Token;

/// A claim that has a node, or may have one.
#[derive(Debug)]
pub(super) struct Entry {
    pub(super) session: Arc<Session>,
    pub(super) tag: Tag,
    pub(super) epoch: u64,
    /// `None`: a create is under way, or its answer was lost.
    pub(super) node: Option<Node>,
    /// Until when it is held, if it is.
    pub(super) lease: Option<Moment>,
    /// The connection on which the node is watched, since it is held.
    pub(super) watched_on: u64,
    /// Its node says that it waits for permits.
    pub(super) says_it_waits: bool,
    /// Where the node is, or will be, if a downgrade was done of which that is not known yet.
    pub(super) moving: Option<String>,
}

impl Entry {
    /// A claim whose node is about to be made.
    fn new(session: &Arc<Session>, tag: Tag, epoch: u64) -> Self {
        let session = session.clone();
        let (node, lease, watched_on, says_it_waits, moving) = (None, None, 0, false, None);
        Self { session, tag, epoch, node, lease, watched_on, says_it_waits, moving }
    }

    /// Where the node is; `None` if it has to be found.
    pub(super) fn sure_path(&self) -> Option<String> {
        let node = self.node.as_ref().filter(|_| self.moving.is_none());
        node.map(|node| node.path.clone())
    }

    /// Where else than at `path` the node may be.
    pub(super) fn elsewhere(&self, path: &str) -> Option<String> {
        let node = self.node.as_ref().map(|node| &node.path);
        [self.moving.as_ref(), node].into_iter().flatten().find(|other| *other != path).cloned()
    }
}

/// A claim's node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Node {
    pub(super) path: String,
    pub(super) token: Token,
}

impl Node {
    pub(super) fn name(&self) -> &str {
        self.path.rsplit('/').next().unwrap_or_default()
    }

    pub(super) fn parent(&self) -> &str {
        self.path.rsplit_once('/').map_or("", |(parent, _)| parent)
    }
}

/// What stopped a claim on its way.
pub(super) enum Trouble {
    /// The connection, or the session; a claim that waits begins again when there is another.
    Fault(Fault),
    Error(Error),
}

impl From<Fault> for Trouble {
    fn from(fault: Fault) -> Self {
        Trouble::Fault(fault)
    }
}

impl From<Error> for Trouble {
    fn from(error: Error) -> Self {
        Trouble::Error(error)
    }
}

impl From<Trouble> for Error {
    fn from(trouble: Trouble) -> Self {
        match trouble {
            Trouble::Fault(fault) => fault.into(),
            Trouble::Error(error) => error,
        }
    }
}

/// How far a claim came.
enum Stood {
    Granted(Grant),
    NotInTime,
    Again,
}

/// One claim and where it asks.
pub(super) struct Asking<'a> {
    pub(super) claim: &'a Claim,
    pub(super) session: Arc<Session>,
    pub(super) tag: Tag,
    pub(super) parent: String,
}

pub(super) enum Entered {
    Known(Node),
    Unsure,
    /// The node was asked for just now, and the list behind it.
    Fresh {
        create: Answer,
        list: Answer,
    },
}

/// What became of a create.
pub(super) enum Settled {
    At(Node),
    Again,
    /// The numbers of the name are used up, and others stand there yet.
    NoNumbers,
}

impl Book {
    /// Takes a claim out.
    pub(super) fn take(&mut self, id: ClaimId) -> Option<Entry> {
        let entry = self.entries.remove(&id)?;
        if let Some(node) = &entry.node {
            self.watched.remove(&node.path);
        }
        if let Some(path) = &entry.moving {
            self.watched.remove(path);
        }
        Some(entry)
    }

    /// The claim's node is at `path` now, where it is not watched yet.
    pub(super) fn moved(&mut self, id: ClaimId, path: &str) -> bool {
        let Some(entry) = self.entries.get_mut(&id) else { return false };
        let Some(node) = &mut entry.node else { return false };
        let old = std::mem::replace(&mut node.path, path.to_owned());
        entry.moving = None;
        entry.watched_on = 0;
        if old != path {
            self.watched.remove(&old);
        }
        true
    }
}

impl Core {
    pub(super) async fn acquire(&self, claim: &Claim, wait: Wait) -> Result<Option<Grant>> {
        if claim.floor.is_some() {
            return Err(no_fence());
        }
        check_permits(claim)?;
        let parent = self.paths.lock(&claim.name)?;
        let (session, tag) = self.session_for(claim).await?;
        let asking = Asking { claim, session, tag, parent };
        let mut give_up = at_most(PATIENCE, self.clock.now(), Moment::NEVER);
        loop {
            let fault = match self.stand(&asking, wait).await {
                Ok(Stood::Granted(grant)) => return Ok(Some(grant)),
                Ok(Stood::NotInTime) => return Ok(None),
                Ok(Stood::Again) => {
                    // It had a place, and keeps it over whatever happens to the connection.
                    if wait != Wait::No {
                        give_up = wait.deadline();
                    }
                    continue;
                }
                Err(Trouble::Error(error)) => return Err(error),
                Err(Trouble::Fault(fault)) => fault,
            };
            if !fault.is_passing() {
                return Err(fault.into());
            }
            if let Fault::Refused(_) = fault {
                // The server ends the connection now, and the next one knows more.
                tokio::time::sleep(PASSES).await;
            }
            let has_place = self.book().entries.contains_key(&claim.id);
            if has_place && wait != Wait::No {
                give_up = wait.deadline();
            }
            asking.session.ready(give_up).await?;
        }
    }

    /// The client's own session, or one for a lock that outlives it or ends before it.
    async fn session_for(&self, claim: &Claim) -> Result<(Arc<Session>, Tag)> {
        if !claim.fixed && !claim.detachable {
            return Ok((self.main.clone(), MAIN));
        }
        let unsupported = |what: String| Err(Error::Unsupported { engine: ENGINE, what });
        if claim.fixed && claim.detachable {
            let what = "a fixed lease that is detachable: nobody can tell how long it still lasts";
            return unsupported(what.to_owned());
        }
        if let Some(entry) = self.book().entries.get(&claim.id)
            && !entry.session.status().ended
        {
            return Ok((entry.session.clone(), entry.tag));
        }
        let tag = self.new_tag();
        let session = self.start_session(new_session(claim.ttl)?, tag);
        Box::pin(session.ready(self.clock.now() + PATIENCE)).await?;
        let negotiated = session.timeout();
        if negotiated < claim.ttl {
            session.close().await;
            return unsupported(format!(
                "a lease of {:?} that is fixed or detachable: the server keeps sessions for at \
                 most {negotiated:?} (maxSessionTimeout)",
                claim.ttl
            ));
        }
        Ok((session, tag))
    }

    /// A session for one lock, on the engine's runtime: the caller's may end before the lock does.
    pub(super) fn start_session(&self, hello: Hello, tag: Tag) -> Arc<Session> {
        let _on = self.runtime.enter();
        let told = teller(tag, self.happenings.clone());
        Arc::new(Session::start(self.servers.clone(), self.clock.clone(), hello, false, told))
    }

    /// Gets a place, and waits at it.
    async fn stand(&self, asking: &Asking<'_>, wait: Wait) -> Result<Stood, Trouble> {
        let (node, children) = match self.enter(asking)? {
            Entered::Known(node) => {
                let list = asking.session.children(&asking.parent, false);
                (node, self.listed(asking, list).await?)
            }
            Entered::Unsure => match self.find(asking).await? {
                Some(found) => found,
                None => return Ok(Stood::Again),
            },
            Entered::Fresh { create, list } => match self.settle(asking, create).await? {
                Settled::At(node) => (node, self.listed(asking, list).await?),
                Settled::Again => return Ok(Stood::Again),
                Settled::NoNumbers if self.clock.now() >= wait.deadline() => {
                    return Ok(Stood::NotInTime);
                }
                Settled::NoNumbers => {
                    Box::pin(self.wait_for_numbers(asking, wait.deadline())).await?;
                    return Ok(Stood::Again);
                }
            },
        };
        let queue = self.layout.queue(&children);
        match judge(&queue, node.name()) {
            Verdict::Admitted => match self.admitted(asking, &node).await? {
                Some(grant) => Ok(Stood::Granted(grant)),
                None => Ok(Stood::Again),
            },
            Verdict::Gone => {
                // Deleted by somebody, or it ended with its session. It may begin anew.
                self.book().take(asking.claim.id);
                Ok(Stood::Again)
            }
            Verdict::Clash(why) => {
                self.leave(asking, &node).await?;
                let name = asking.claim.name.clone();
                Err(Error::Conflict { name, why }.into())
            }
            Verdict::Wait(_) if self.clock.now() >= wait.deadline() => {
                self.leave(asking, &node).await?;
                Ok(Stood::NotInTime)
            }
            Verdict::Wait(wait_for) => {
                // Boxed, because only few come here.
                Box::pin(self.wait(asking, &node, wait_for, &children, wait.deadline())).await?;
                Ok(Stood::Again)
            }
        }
    }

    /// A parent that has vanished has no children.
    pub(super) async fn listed(&self, _: &Asking<'_>, list: Answer) -> Answered<Vec<String>> {
        match list.children().await {
            Err(fault) if fault.is(Refusal::NO_NODE) => Ok(Vec::new()),
            children => children,
        }
    }

    /// Asks for a node unless there is one. The book is open meanwhile, so that a withdrawal comes
    /// either before, and nothing is sent, or after, and its own request is sent later.
    pub(super) fn enter(&self, asking: &Asking<'_>) -> Result<Entered, Trouble> {
        let Asking { claim, session, tag, parent } = asking;
        let mut book = self.book();
        if book.withdrawn.contains(claim.id) {
            return Err(Error::NotHeld { name: claim.name.clone() }.into());
        }
        let status = session.status();
        match book.entries.get(&claim.id) {
            Some(entry) if entry.epoch == status.epoch => {
                return Ok(entry.node.clone().map_or(Entered::Unsure, Entered::Known));
            }
            // It ended with its session.
            Some(_) => drop(book.take(claim.id)),
            None => {}
        }
        if !status.connected {
            let fault = if status.ended { Fault::Ended } else { Fault::NotSent };
            return Err(fault.into());
        }
        book.entries.insert(claim.id, Entry::new(session, *tag, status.epoch));
        let node = format!("{parent}/{}", self.layout.node_prefix(claim.id, claim.mode));
        let data = Words::of(claim).write();
        let create = session.create(&node, &data, self.acl, Kind::EphemeralSequential);
        let list = session.children(parent, false);
        Ok(Entered::Fresh { create, list })
    }

    /// What became of a create.
    pub(super) async fn settle(
        &self,
        asking: &Asking<'_>,
        create: Answer,
    ) -> Result<Settled, Trouble> {
        let Asking { claim, session, .. } = asking;
        match create.created().await {
            Ok((path, stat)) => {
                let node = Node { path, token: token_of(stat.czxid) };
                if number_of(node.name()).is_some_and(|n| !(0..i32::MAX).contains(&n)) {
                    return self.give_back(asking, &node).await;
                }
                match self.believe(asking, &node, stat.owner)? {
                    true => Ok(Settled::At(node)),
                    false => Ok(Settled::Again),
                }
            }
            Err(fault @ (Fault::Unknown | Fault::NotSent | Fault::Ended)) => {
                if matches!(fault, Fault::NotSent) {
                    self.book().take(claim.id);
                }
                Err(fault.into())
            }
            Err(fault @ Fault::Refused(why)) => {
                self.book().take(claim.id);
                if fault.is_passing() {
                    return Err(fault.into());
                }
                if why != Refusal::NO_NODE {
                    return Err(refused(&asking.parent, why));
                }
                let kind = match self.layout.has_containers() {
                    true => Kind::Container,
                    false => Kind::Persistent,
                };
                // Somebody may have removed the chroot, too.
                let chroot = &self.paths.chroot;
                let mut made = self.make_nodes(session, "", chroot, Kind::Persistent).await;
                if made.is_ok() {
                    made = self.make_nodes(session, chroot, &asking.parent, kind).await;
                }
                match made {
                    Ok(()) => Ok(Settled::Again),
                    // Made or not, the next connection finds out.
                    Err(error) if error.is_retryable() => Err(Fault::Unknown.into()),
                    Err(error) => Err(error.into()),
                }
            }
        }
    }

    /// Writes down that a node is the claim's, if it is one of the present session.
    fn believe(&self, asking: &Asking<'_>, node: &Node, owner: i64) -> Result<bool, Trouble> {
        let mut book = self.book();
        let status = asking.session.status();
        if book.withdrawn.contains(asking.claim.id) {
            drop(book);
            self.erase(asking, Some(node.path.clone()));
            return Err(Error::NotHeld { name: asking.claim.name.clone() }.into());
        }
        if owner != asking.session.id() {
            // A node of a session that is over is never believed; it goes by itself.
            book.take(asking.claim.id);
            return Ok(false);
        }
        let entry = book
            .entries
            .entry(asking.claim.id)
            .or_insert_with(|| Entry::new(&asking.session, asking.tag, status.epoch));
        entry.epoch = status.epoch;
        entry.node = Some(node.clone());
        Ok(true)
    }

    /// Gives back a number that is none: at their end the server gives the last one again and
    /// again, or negative ones, and no order is left. They begin anew with a new parent, so the old
    /// one is removed as soon as it is empty.
    async fn give_back(&self, asking: &Asking<'_>, node: &Node) -> Result<Settled, Trouble> {
        self.book().take(asking.claim.id);
        let mut unsure = Unsure::new(self, asking, node);
        let deleted = asking.session.delete(&node.path);
        let emptied = asking.session.delete(&asking.parent);
        gone(deleted.done().await)?;
        unsure.is_done();
        match gone(emptied.done().await) {
            Ok(()) => Ok(Settled::Again),
            Err(Fault::Refused(_)) => Ok(Settled::NoNumbers),
            Err(fault) => Err(fault.into()),
        }
    }

    /// Waits until somebody leaves who has one of the last numbers.
    async fn wait_for_numbers(&self, asking: &Asking<'_>, deadline: Moment) -> Answered<()> {
        let list = asking.session.children(&asking.parent, false);
        let children = self.listed(asking, list).await?;
        match self.layout.queue(&children).pop() {
            None => Ok(()),
            Some(last) => {
                let paths = [format!("{}/{}", asking.parent, last.node)];
                self.wait_for_change(asking, &paths, deadline).await
            }
        }
    }

    /// Looks for the node of a create whose answer was lost.
    async fn find(&self, asking: &Asking<'_>) -> Result<Option<(Node, Vec<String>)>, Trouble> {
        let Asking { claim, session, parent, .. } = asking;
        let (sync, list) = (session.sync(parent), session.children(parent, false));
        sync.done().await?;
        let children = self.listed(asking, list).await?;
        let Some(child) = children.iter().find(|child| self.layout.bears(child, claim.id)) else {
            // It never was, and will not be: see the beginning of `zookeeper.rs`.
            let mut book = self.book();
            if book.entries.get(&claim.id).is_some_and(|entry| entry.node.is_none()) {
                book.take(claim.id);
            }
            return Ok(None);
        };
        let path = format!("{parent}/{child}");
        match session.data(&path, false).data().await {
            Ok((data, stat)) => {
                let token = Words::read(&data)
                    .map_or_else(|| token_of(stat.czxid), |words| words.token(stat.czxid));
                let node = Node { path, token };
                let ours = self.believe(asking, &node, stat.owner)?;
                Ok(ours.then_some((node, children)))
            }
            Err(fault) if fault.is(Refusal::NO_NODE) => {
                self.book().take(claim.id);
                Ok(None)
            }
            Err(fault) => Err(fault.into()),
        }
    }

    /// The claim is the first: the grant, unless it was lost on the last step.
    pub(super) async fn admitted(
        &self,
        asking: &Asking<'_>,
        node: &Node,
    ) -> Result<Option<Grant>, Trouble> {
        let Asking { claim, session, tag, .. } = asking;
        let (now, timeout) = (self.clock.now(), session.timeout());
        let left = session.trusted_until().saturating_duration_since(now);
        if *tag != MAIN {
            session.rest();
        }
        if claim.fixed && left < timeout / 10 * 9 {
            Box::pin(session.greet_again(at_most(PATIENCE, now, Moment::NEVER))).await?;
        } else if !claim.fixed && left < timeout / 3 {
            session.sync(&self.paths.chroot).done().await?;
        }
        let valid_until = match claim.fixed {
            // It is not renewed, so it lasts as long as was asked for.
            true => {
                let asked = trusted_until(self.clock.now(), claim.ttl);
                session.trusted_until().min(asked)
            }
            false => session.lease_from(self.clock.now()),
        };
        let says_it_waits = {
            let mut book = self.book();
            if book.withdrawn.contains(claim.id) {
                return Err(Error::NotHeld { name: claim.name.clone() }.into());
            }
            let status = session.status();
            let entry = book.entries.get_mut(&claim.id);
            let entry = entry.filter(|entry| entry.epoch == status.epoch);
            let Some(entry) = entry else { return Ok(None) };
            entry.lease = Some(valid_until);
            std::mem::take(&mut entry.says_it_waits)
        };
        if says_it_waits {
            self.say_admitted(session, node.path.clone());
        }
        let key = Key {
            path: node.path.clone(),
            session: (*tag != MAIN && claim.detachable).then(|| session.credentials()),
        };
        Ok(Some(Grant { token: node.token, valid_until, key: key.write() }))
    }

    /// Waits until those who are before the claim may have changed, or its time is over.
    async fn wait(
        &self,
        asking: &Asking<'_>,
        node: &Node,
        wait_for: WaitFor,
        children: &[String],
        deadline: Moment,
    ) -> Answered<()> {
        let Asking { claim, parent, .. } = asking;
        if matches!(claim.mode, Mode::Permits { .. }) {
            self.say_waiting(asking, node).await?;
        }
        let nodes = match &wait_for {
            WaitFor::One(one) | WaitFor::Behind(one) => std::slice::from_ref(one),
            WaitFor::AnyOf(nodes) => nodes,
        };
        let paths: Vec<String> = nodes.iter().map(|node| format!("{parent}/{node}")).collect();
        match &wait_for {
            WaitFor::Behind(_) => self.wait_behind(asking, &paths, children, deadline).await,
            _ => self.wait_for_change(asking, &paths, deadline).await,
        }
    }

    /// Waits until one of these nodes has changed.
    async fn wait_for_change(
        &self,
        asking: &Asking<'_>,
        paths: &[String],
        deadline: Moment,
    ) -> Answered<()> {
        let session = &asking.session;
        let watching: Vec<_> = paths.iter().map(|path| session.watch(path)).collect();
        let looks: Vec<_> = paths.iter().map(|path| session.data(path, true)).collect();
        for look in looks {
            match look.data().await {
                Err(fault) if fault.is(Refusal::NO_NODE) => return Ok(()),
                look => drop(look?),
            }
        }
        self.until_changed(&watching, deadline).await;
        Ok(())
    }

    /// Waits until the one before, which waits for permits itself, has left or got them.
    async fn wait_behind(
        &self,
        asking: &Asking<'_>,
        path: &[String],
        children: &[String],
        deadline: Moment,
    ) -> Answered<()> {
        let Asking { session, parent, .. } = asking;
        let Some(path) = path.first() else { return Ok(()) };
        let mut watching = vec![session.watch(path)];
        let said = match session.data(path, true).data().await {
            Err(fault) if fault.is(Refusal::NO_NODE) => return Ok(()),
            look => Words::read(&look?.0).and_then(|words| words.admitted),
        };
        match said {
            Some(true) => return Ok(()),
            Some(false) => {}
            None => {
                // It has not found out itself yet whether it waits, and may never say: so any
                // change counts, until it does.
                watching.push(session.watch(parent));
                if session.children(parent, true).children().await? != children {
                    return Ok(());
                }
            }
        }
        self.until_changed(&watching, deadline).await;
        Ok(())
    }

    async fn until_changed(&self, watching: &[Watching], deadline: Moment) {
        let changes = watching.iter().map(|watching| Box::pin(watching.changed()));
        tokio::select! {
            _ = futures_util::future::select_all(changes) => {}
            () = self.clock.sleep_until(deadline) => {}
        }
    }
}

fn refused(path: &str, why: Refusal) -> Trouble {
    failed(format!("the server refused a node at `{path}`: {why}"), false).into()
}
