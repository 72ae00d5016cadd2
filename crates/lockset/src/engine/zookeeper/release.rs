//! Giving back and leaving: a node of ours goes, and stays gone, whatever becomes of the answer.

use std::sync::Arc;

use tokio::sync::oneshot;

use super::acquire::{Asking, Entered, Entry, Node, Settled, Trouble};
use super::admission::{Verdict, judge};
use super::client::session::{Answer, Answered, Fault, PASSES, Session, failed};
use super::client::wire::Refusal;
use super::layout::number_of;
use super::{Core, MAIN, PATIENCE};
use crate::clock::Moment;
use crate::engine::{Claim, ClaimId, Grant};
use crate::error::{Error, Result};
use crate::report::report;

/// When a name's numbers have come so far, its node is removed as soon as it is empty, so that
/// they begin anew: nobody's order survives their overflow.
const HIGH_NUMBER: i32 = i32::MAX - (1 << 20);

impl Core {
    /// Removes a claim's node that did not get what it wanted. What cannot be done now is done
    /// later, but not promised.
    pub(super) async fn leave(&self, asking: &Asking<'_>, node: &Node) -> Result<(), Trouble> {
        self.book().take(asking.claim.id);
        if asking.tag != MAIN {
            asking.session.close().await;
            return Ok(());
        }
        let mut unsure = Unsure::new(self, asking, node);
        let outcome = asking.session.delete(&node.path).done().await;
        match outcome {
            Ok(()) => unsure.is_done(),
            Err(fault) if fault.is(Refusal::NO_NODE) => unsure.is_done(),
            Err(fault) => return Err(Trouble::Error(fault.into())),
        }
        Ok(())
    }

    /// Gives a lock back, and asks for the next one in the same breath.
    pub(super) async fn release(
        &self,
        claim: &Claim,
        grant: &Grant,
        next: Option<&Claim>,
    ) -> Result<Option<Grant>> {
        let not_held = || Error::NotHeld { name: claim.name.clone() };
        let entry = self.book().take(claim.id).ok_or_else(not_held)?;
        let (sure, moving) = (entry.sure_path(), entry.moving);
        let Some(node) = entry.node else { return Err(not_held()) };
        let asking = Asking {
            claim,
            session: entry.session,
            tag: entry.tag,
            parent: node.parent().to_owned(),
        };
        let mut unsure = Unsure { core: self, asking: &asking, path: Some(sure) };
        let deleting = asking.session.delete(&node.path);
        // It is at one of the two places, and what moves it was sent before.
        let moved = moving.map(|path| asking.session.delete(&path));
        if number_of(node.name()).is_some_and(|number| number > HIGH_NUMBER) {
            drop(asking.session.delete(&asking.parent));
        }
        let next = next.filter(|next| asking.tag == MAIN && !next.fixed && !next.detachable);
        let next = next.map(|next| Asking {
            claim: next,
            session: asking.session.clone(),
            tag: MAIN,
            parent: asking.parent.clone(),
        });
        // The release stands whatever becomes of the next.
        let entered = next.as_ref().and_then(|next| Some((next, self.enter(next).ok()?)));
        let mut released = deleting.done().await;
        if let (Some(moved), Err(Fault::Refused(Refusal::NO_NODE))) = (moved, &released) {
            released = moved.done().await;
        }
        match released {
            Ok(()) if node.token == grant.token => unsure.is_done(),
            Ok(()) | Err(Fault::Refused(Refusal::NO_NODE)) => {
                unsure.is_done();
                if let Some((next, Entered::Fresh { .. })) = entered {
                    self.undo(next).await;
                }
                return Err(not_held());
            }
            Err(fault) => return Err(fault.into()),
        }
        if asking.tag != MAIN {
            asking.session.close().await;
        }
        let Some((next, entered)) = entered else { return Ok(None) };
        Ok(self.granted_at_once(next, entered).await.ok().flatten())
    }

    /// What a claim that was taken along by a release got; if nothing, it finds out itself.
    async fn granted_at_once(
        &self,
        next: &Asking<'_>,
        entered: Entered,
    ) -> Result<Option<Grant>, Trouble> {
        let Entered::Fresh { create, list } = entered else { return Ok(None) };
        let Settled::At(node) = self.settle(next, create).await? else { return Ok(None) };
        let children = self.listed(next, list).await?;
        match judge(&self.layout.queue(&children), node.name()) {
            Verdict::Admitted => self.admitted(next, &node).await,
            _ => Ok(None),
        }
    }

    /// Takes back what was asked for in vain.
    async fn undo(&self, asking: &Asking<'_>) {
        let entry = self.book().take(asking.claim.id);
        if let Some(entry) = entry {
            // It goes on in the background.
            tokio::time::timeout(PATIENCE, self.erase(asking, entry.sure_path())).await.ok();
        }
    }

    /// Removes whatever bears the claim's id, and sees to it that nothing comes later.
    pub(super) async fn withdraw(&self, claim: &Claim) -> Result<()> {
        let entry = {
            let mut book = self.book();
            book.withdrawn.insert(claim.id, self.clock.now());
            book.take(claim.id)
        };
        let parent = self.paths.lock(&claim.name)?;
        let Some(entry) = entry else {
            // One of this client's that is not in the book has no node; but a ticket's may.
            if !claim.detachable {
                return Ok(());
            }
            self.ready().await?;
            let asking = Asking { claim, session: self.main.clone(), tag: MAIN, parent };
            return Eraser::new(self, &asking, None).attempt().await.map_err(Error::from);
        };
        let path = entry.sure_path();
        let asking = Asking { claim, session: entry.session, tag: entry.tag, parent };
        if asking.tag != MAIN && asking.session.status().connected {
            asking.session.close().await;
            return Ok(());
        }
        let erased = self.erase(&asking, path);
        let late = || failed("the connection is down; it is removed when it is back".into(), true);
        match tokio::time::timeout(PATIENCE, erased).await {
            Ok(Ok(())) => Ok(()),
            _ => Err(late()),
        }
    }

    /// Removes a claim's node, however long it takes until the answer is sure: the session lives on
    /// when a lock is given back, and so would the node. Goes on in the background if it is not
    /// waited for.
    pub(super) fn erase(&self, asking: &Asking<'_>, path: Option<String>) -> oneshot::Receiver<()> {
        self.erase_all(Eraser::new(self, asking, path))
    }

    /// The same, for a lease that has ended.
    pub(super) fn erase_entry(&self, id: ClaimId, entry: Entry) {
        let (layout, path) = (self.layout, entry.sure_path());
        let Entry { session, epoch, node: Some(node), .. } = entry else { return };
        let parent = node.parent().to_owned();
        drop(self.erase_all(Eraser { layout, session, epoch, parent, id, path }));
    }

    fn erase_all(&self, eraser: Eraser) -> oneshot::Receiver<()> {
        let (tell, done) = oneshot::channel();
        // Asked for at once, so that what is sent later comes after it.
        let first = eraser.path.as_ref().map(|path| eraser.session.delete(path));
        self.runtime.spawn(async move {
            eraser.run(first).await;
            // Nobody has to wait for it.
            let _ = tell.send(());
        });
        done
    }
}

/// A node that must go.
struct Eraser {
    layout: super::Layout,
    session: Arc<Session>,
    epoch: u64,
    parent: String,
    id: ClaimId,
    /// `None`: it has to be found.
    path: Option<String>,
}

impl Eraser {
    fn new(core: &Core, asking: &Asking<'_>, path: Option<String>) -> Self {
        Self {
            layout: core.layout,
            session: asking.session.clone(),
            epoch: asking.session.status().epoch,
            parent: asking.parent.clone(),
            id: asking.claim.id,
            path,
        }
    }

    async fn run(self, first: Option<Answer>) {
        let mut outcome = match first {
            Some(first) => gone(first.done().await),
            None => self.attempt().await,
        };
        loop {
            match outcome {
                Ok(()) => return,
                Err(fault @ Fault::Refused(_)) if fault.is_passing() => {
                    tokio::time::sleep(PASSES).await;
                }
                Err(Fault::Refused(why)) => {
                    report!(warn, parent = self.parent, reason = why, "a node cannot be removed");
                    return;
                }
                Err(_) => {}
            }
            match self.session.ready(Moment::NEVER).await {
                Ok(status) if status.epoch == self.epoch => {}
                // The node ended with its session.
                _ => return,
            }
            outcome = self.attempt().await;
        }
    }

    async fn attempt(&self) -> Answered<()> {
        if let Some(path) = &self.path {
            return gone(self.session.delete(path).done().await);
        }
        let (sync, list) =
            (self.session.sync(&self.parent), self.session.children(&self.parent, false));
        sync.done().await?;
        let children = match list.children().await {
            Err(fault) if fault.is(Refusal::NO_NODE) => return Ok(()),
            children => children?,
        };
        for child in children.iter().filter(|child| self.layout.bears(child, self.id)) {
            gone(self.session.delete(&format!("{}/{child}", self.parent)).done().await)?;
        }
        Ok(())
    }
}

pub(super) fn gone(deleted: Answered<()>) -> Answered<()> {
    match deleted {
        Err(fault) if fault.is(Refusal::NO_NODE) => Ok(()),
        deleted => deleted,
    }
}

/// A delete under way. Dropped before its answer is known to be one, it is repeated until it is.
pub(super) struct Unsure<'a> {
    core: &'a Core,
    asking: &'a Asking<'a>,
    /// Where it is, or that it has to be found; nothing once it is gone.
    path: Option<Option<String>>,
}

impl<'a> Unsure<'a> {
    pub(super) fn new(core: &'a Core, asking: &'a Asking<'a>, node: &Node) -> Self {
        Self { core, asking, path: Some(Some(node.path.clone())) }
    }

    pub(super) fn is_done(&mut self) {
        self.path = None;
    }
}

impl Drop for Unsure<'_> {
    fn drop(&mut self) {
        if let Some(path) = self.path.take() {
            drop(self.core.erase(self.asking, path));
        }
    }
}
