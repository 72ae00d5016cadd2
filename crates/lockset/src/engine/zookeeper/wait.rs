//! Waiting in the queue: what a waiter watches, and what its node tells the waiters behind it.

use std::sync::Arc;

use super::ZooKeeperCore;
use super::acquire::ClaimContext;
use super::admission::WatchTarget;
use super::claim_table::{ClaimNode, TrackedClaim};
use super::client::{NodeWatch, Session, TRANSIENT_PAUSE, ZkErrorCode, ZkResult};
use super::record::{ClaimRecord, edit_record};
use crate::clock::Moment;
use crate::engine::Mode;

impl ZooKeeperCore {
    /// Waits until the nodes before the claim's may have changed, or the deadline has passed.
    pub(super) async fn wait_in_queue(
        &self,
        context: &ClaimContext<'_>,
        node: &ClaimNode,
        target: WatchTarget,
        children: &[String],
        deadline: Moment,
    ) -> ZkResult<()> {
        if matches!(context.claim.mode, Mode::Permits { .. }) {
            self.publish_waiting(context, node).await?;
        }
        let path = |node: &String| format!("{}/{node}", context.parent);
        match &target {
            WatchTarget::Node(before) => self.wait_any(context, &[path(before)], deadline).await,
            WatchTarget::AnyOf(nodes) => {
                let paths: Vec<String> = nodes.iter().map(path).collect();
                self.wait_any(context, &paths, deadline).await
            }
            WatchTarget::PermitWaiter(before) => {
                self.wait_behind_permit_waiter(context, &path(before), children, deadline).await
            }
        }
    }

    /// Waits until a node with one of the last sequence numbers is gone.
    pub(super) async fn wait_for_sequence_numbers(
        &self,
        context: &ClaimContext<'_>,
        deadline: Moment,
    ) -> ZkResult<()> {
        let list = context.session.children(&context.parent, false);
        let children = list.children_if_any().await?;
        match self.layout.queue(&children).pop() {
            None => Ok(()),
            Some(last) => {
                let paths = [format!("{}/{}", context.parent, last.name)];
                self.wait_any(context, &paths, deadline).await
            }
        }
    }

    /// Waits until one of these nodes has changed.
    async fn wait_any(
        &self,
        context: &ClaimContext<'_>,
        paths: &[String],
        deadline: Moment,
    ) -> ZkResult<()> {
        let session = &context.session;
        let watches: Vec<_> = paths.iter().map(|path| session.watch(path)).collect();
        let reads: Vec<_> = paths.iter().map(|path| session.data(path, true)).collect();
        for read in reads {
            match read.data().await {
                Err(error) if error.is(ZkErrorCode::NO_NODE) => return Ok(()),
                read => drop(read?),
            }
        }
        self.wait_changed(&watches, deadline).await;
        Ok(())
    }

    /// Waits until the claim before, which waits for permits itself, is gone or admitted.
    async fn wait_behind_permit_waiter(
        &self,
        context: &ClaimContext<'_>,
        path: &str,
        children: &[String],
        deadline: Moment,
    ) -> ZkResult<()> {
        let ClaimContext { session, parent, .. } = context;
        let mut watches = vec![session.watch(path)];
        let admitted = match session.data(path, true).data().await {
            Err(error) if error.is(ZkErrorCode::NO_NODE) => return Ok(()),
            read => ClaimRecord::decode(&read?.0).and_then(|record| record.admitted),
        };
        match admitted {
            Some(true) => return Ok(()),
            Some(false) => {}
            None => {
                // It does not know yet whether it has to wait, and may never publish it. Until it
                // does, any change of the queue counts.
                watches.push(session.watch(parent));
                if session.children(parent, true).children().await? != children {
                    return Ok(());
                }
            }
        }
        self.wait_changed(&watches, deadline).await;
        Ok(())
    }

    async fn wait_changed(&self, watches: &[NodeWatch], deadline: Moment) {
        let changes = watches.iter().map(|watch| Box::pin(watch.changed()));
        tokio::select! {
            _ = futures_util::future::select_all(changes) => {}
            () = self.clock.sleep_until(deadline) => {}
        }
    }

    /// Writes to the node that its claim waits, so that those behind it need not watch all holders.
    async fn publish_waiting(&self, context: &ClaimContext<'_>, node: &ClaimNode) -> ZkResult<()> {
        let was_published =
            |entry: &mut TrackedClaim| std::mem::replace(&mut entry.published_waiting, true);
        if self.claims().entries.get_mut(&context.claim.id).is_none_or(was_published) {
            return Ok(());
        }
        let write = |record: &mut ClaimRecord| record.admitted = Some(false);
        match edit_record(&context.session, &node.path, write).await {
            // The next list shows that the node is gone.
            Err(error) if error.is(ZkErrorCode::NO_NODE) => Ok(()),
            // Even if this failed it may have been written, so the flag stays set and it is undone
            // in the end. If it was not written, the waiters behind watch the whole queue.
            written => written,
        }
    }

    /// Writes to the node, in the background, that its claim no longer waits. Repeated until it is
    /// answered.
    pub(super) fn publish_admitted(&self, session: &Arc<Session>, path: String) {
        let (session, epoch) = (session.clone(), session.status().epoch);
        self.runtime.spawn(async move {
            loop {
                match edit_record(&session, &path, |record| record.admitted = Some(true)).await {
                    Err(error) if error.is_transient() => tokio::time::sleep(TRANSIENT_PAUSE).await,
                    Ok(()) | Err(_) => return,
                }
                match session.wait_connected(Moment::NEVER).await {
                    Ok(status) if status.epoch == epoch => {}
                    _ => return,
                }
            }
        });
    }
}
