//! Waiting in the queue: watching the nodes that keep a claim from being admitted.

use super::ZooKeeperCore;
use super::acquire::ClaimContext;
use super::client::{ZkErrorCode, ZkResult};
use crate::clock::Moment;

impl ZooKeeperCore {
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
            Some(last) => self.wait_for_nodes(context, &[last.name], deadline).await,
        }
    }

    /// Waits until one of these nodes has changed, or the deadline has passed.
    pub(super) async fn wait_for_nodes(
        &self,
        context: &ClaimContext<'_>,
        nodes: &[String],
        deadline: Moment,
    ) -> ZkResult<()> {
        let ClaimContext { session, parent, .. } = context;
        let paths: Vec<String> = nodes.iter().map(|node| format!("{parent}/{node}")).collect();
        let watches: Vec<_> = paths.iter().map(|path| session.watch(path)).collect();
        let reads: Vec<_> = paths.iter().map(|path| session.data(path, true)).collect();
        for read in reads {
            match read.data().await {
                Err(error) if error.is(ZkErrorCode::NO_NODE) => return Ok(()),
                read => drop(read?),
            }
        }
        let changes = watches.iter().map(|watch| Box::pin(watch.changed()));
        tokio::select! {
            _ = futures_util::future::select_all(changes) => {}
            () = self.clock.sleep_until(deadline) => {}
        }
        Ok(())
    }
}
