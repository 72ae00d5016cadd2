//! Hints: how an engine tells a watch which names may have changed.
//!
//! What a watch has not consumed yet is a set of names, so a watch that is not polled costs a
//! bounded amount of memory, however much changes.

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use futures_core::Stream;
use futures_core::stream::BoxStream;
use futures_util::StreamExt;
use tokio::sync::{mpsc, watch};
#[cfg(any(feature = "redis", feature = "postgres"))]
use tokio::time::Instant;

use crate::engine::{Event, Hint, Scope};
use crate::error::{Error, Result};
use crate::hash::FastMap;
use crate::name::Name;
use crate::sync;

/// How often a watch reads its whole scope where nothing tells of changes.
pub(crate) const RECHECK: Duration = Duration::from_secs(1);
/// Maximum names that a watch has not consumed yet. With more, it reads its whole scope again.
const MAX_PENDING: usize = 1024;
/// Watches that were dropped are forgotten at the latest when there are this many entries.
const MIN_SWEEP: usize = 64;

/// The engine's end of one watch. The hints end when all its clones are dropped.
#[derive(Clone, Debug)]
pub(crate) struct HintSender {
    scope: Scope,
    pending: Arc<Mutex<PendingHints>>,
    wake: watch::Sender<()>,
}

/// The hints for one watch.
#[derive(Debug)]
pub(crate) struct HintReceiver {
    pending: Arc<Mutex<PendingHints>>,
    wake: watch::Receiver<()>,
}

#[derive(Debug, Default)]
struct PendingHints {
    names: BTreeSet<Name>,
    missed: bool,
    error: Option<Error>,
}

pub(crate) fn hint_channel(scope: &Scope) -> (HintSender, HintReceiver) {
    let (sender, receiver) = watch::channel(());
    let pending = Arc::<Mutex<PendingHints>>::default();
    let hints = HintReceiver { pending: pending.clone(), wake: receiver };
    (HintSender { scope: scope.clone(), pending, wake: sender }, hints)
}

impl HintSender {
    /// This name may have changed; names outside the scope are ignored.
    pub(crate) fn changed(&self, name: &Name) {
        if self.scope.covers(name) {
            let mut pending = sync::lock(&self.pending);
            if !pending.missed {
                pending.names.insert(name.clone());
            }
            if pending.names.len() > MAX_PENDING {
                (pending.missed, pending.names) = (true, BTreeSet::new());
            }
            self.wake.send_replace(());
        }
    }

    /// Changes may have gone unreported.
    pub(crate) fn missed(&self) {
        sync::lock(&self.pending).missed = true;
        self.wake.send_replace(());
    }

    /// The watch reports this error.
    #[cfg(feature = "etcd")]
    pub(crate) fn fail(&self, error: Error) {
        sync::lock(&self.pending).error = Some(error);
        self.wake.send_replace(());
    }

    /// Waits until the watch was dropped.
    pub(crate) async fn closed(&self) {
        self.wake.closed().await;
    }
}

impl HintReceiver {
    /// The next hint; `None` after the end. Cancel safe.
    pub(crate) async fn next(&mut self) -> Option<Result<Hint>> {
        loop {
            let is_open = self.wake.has_changed().is_ok();
            if let Some(hint) = sync::lock(&self.pending).take() {
                return Some(hint);
            }
            if !is_open {
                return None;
            }
            // Fails when the last sender is dropped: then what it left is read, and the hints end.
            let _ = self.wake.changed().await;
        }
    }

    pub(crate) fn into_stream(self) -> BoxStream<'static, Result<Hint>> {
        let next = |mut hints: Self| async { Some((hints.next().await?, hints)) };
        futures_util::stream::unfold(self, next).boxed()
    }

    /// The hints, and [`Hint::Missed`] whenever there was none for as long as `every` returns:
    /// for engines whose hints may get lost.
    #[cfg(any(feature = "redis", feature = "postgres"))]
    pub(crate) fn with_recheck(
        self,
        every: impl Fn() -> Duration + Send + 'static,
    ) -> BoxStream<'static, Result<Hint>> {
        let (every, last) = (Box::new(every) as Box<dyn Fn() -> Duration + Send>, Instant::now());
        futures_util::stream::unfold((self, every, last), |(mut hints, every, last)| async move {
            let next_recheck = last + every();
            let hint = tokio::select! {
                biased;
                hint = hints.next() => hint?,
                () = tokio::time::sleep_until(next_recheck) => Ok(Hint::Missed),
            };
            let last = if let Ok(Hint::Missed) = hint { Instant::now() } else { last };
            Some((hint, (hints, every, last)))
        })
        .boxed()
    }
}

impl PendingHints {
    fn take(&mut self) -> Option<Result<Hint>> {
        if let Some(error) = self.error.take() {
            return Some(Err(error));
        }
        if std::mem::take(&mut self.missed) {
            self.names.clear();
            return Some(Ok(Hint::Missed));
        }
        self.names.pop_first().map(|name| Ok(Hint::Changed(name)))
    }
}

/// The watches of one client.
#[derive(Debug, Default)]
pub(crate) struct HintSenders {
    names: FastMap<Name, Vec<HintSender>>,
    prefixes: Vec<HintSender>,
    /// How many there were after the last sweep, and how many were added since.
    kept: usize,
    added: usize,
    is_closed: bool,
}

impl HintSenders {
    pub(crate) fn add(&mut self, scope: &Scope) -> (HintSender, HintReceiver) {
        if self.added >= self.kept.max(MIN_SWEEP) {
            self.sweep();
        }
        let (sender, hints) = hint_channel(scope);
        match scope {
            _ if self.is_closed => return (sender, hints),
            Scope::Name(name) => self.names.entry(name.clone()).or_default().push(sender.clone()),
            Scope::Prefix(_) => self.prefixes.push(sender.clone()),
        }
        self.added += 1;
        (sender, hints)
    }

    /// This name may have changed.
    pub(crate) fn changed(&mut self, name: &Name) {
        if let Some(senders) = self.names.get_mut(name) {
            senders.retain(|sender| !sender.wake.is_closed());
            senders.iter().for_each(|sender| sender.changed(name));
            if senders.is_empty() {
                self.names.remove(name);
            }
        }
        self.prefixes.retain(|sender| !sender.wake.is_closed());
        self.prefixes.iter().for_each(|sender| sender.changed(name));
    }

    /// Changes of any name may have gone unreported.
    #[cfg(any(feature = "redis", feature = "postgres", feature = "zookeeper"))]
    pub(crate) fn missed(&self) {
        self.all().for_each(HintSender::missed);
    }

    /// Whether a watch of exactly this name may exist.
    #[cfg(feature = "redis")]
    pub(crate) fn has_name(&self, name: &Name) -> bool {
        self.names.contains_key(name)
    }

    /// The scopes of the watches that are not dropped.
    #[cfg(feature = "postgres")]
    pub(crate) fn scopes(&mut self) -> Vec<Scope> {
        self.sweep();
        self.all().map(|sender| sender.scope.clone()).collect()
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.names.is_empty() && self.prefixes.is_empty()
    }

    /// Forgets the watches that were dropped.
    pub(crate) fn sweep(&mut self) {
        let is_open = |sender: &HintSender| !sender.wake.is_closed();
        self.prefixes.retain(is_open);
        self.names.retain(|_, senders| {
            senders.retain(is_open);
            !senders.is_empty()
        });
        (self.kept, self.added) = (self.all().count(), 0);
    }

    /// Ends all watches, and those that are added later.
    #[cfg(any(feature = "local", feature = "redis", feature = "postgres", feature = "zookeeper"))]
    pub(crate) fn close(&mut self) {
        *self = Self { is_closed: true, ..Self::default() };
    }

    fn all(&self) -> impl Iterator<Item = &HintSender> {
        self.names.values().flatten().chain(&self.prefixes)
    }
}

/// Hints for an engine that has none: the whole scope is read every [`RECHECK`].
pub(crate) fn polling_hints() -> BoxStream<'static, Result<Hint>> {
    futures_util::stream::unfold(Duration::ZERO, |pause| async move {
        tokio::time::sleep(pause).await;
        Some((Ok(Hint::Missed), RECHECK))
    })
    .boxed()
}

/// What an engine tells its keeper, which asks for it once.
pub(crate) fn told_once(
    events: Option<mpsc::UnboundedReceiver<Event>>,
) -> BoxStream<'static, Event> {
    match events {
        Some(events) => receiver_stream(events).boxed(),
        None => futures_util::stream::empty().boxed(),
    }
}

/// A channel as a stream.
pub(crate) fn receiver_stream<T: Send + 'static>(
    receiver: mpsc::UnboundedReceiver<T>,
) -> impl Stream<Item = T> + Send + 'static {
    futures_util::stream::unfold(receiver, |mut receiver| async {
        let item = receiver.recv().await?;
        Some((item, receiver))
    })
}

#[cfg(test)]
mod tests {
    use futures_util::FutureExt;

    use super::*;

    fn name(number: usize) -> Name {
        format!("n{number}").parse().unwrap()
    }

    #[test]
    fn hints_that_are_not_consumed_take_bounded_memory() {
        let (sender, mut hints) = hint_channel(&Scope::Prefix("n".parse().unwrap()));
        sender.changed(&"other".parse().unwrap());
        assert!(hints.next().now_or_never().is_none(), "it is not in scope");
        for _ in 0..3 {
            (0..MAX_PENDING).for_each(|number| sender.changed(&name(number)));
        }
        assert_eq!(sync::lock(&sender.pending).names.len(), MAX_PENDING);
        sender.changed(&name(MAX_PENDING));
        assert!(sync::lock(&sender.pending).names.is_empty());
        let hint = hints.next().now_or_never().unwrap().unwrap().unwrap();
        assert_eq!(hint, Hint::Missed, "all of them");
        sender.changed(&name(7));
        drop(sender);
        let hint = hints.next().now_or_never().unwrap().unwrap().unwrap();
        assert_eq!(hint, Hint::Changed(name(7)), "what was sent before the end");
        assert!(hints.next().now_or_never().unwrap().is_none());
    }

    #[test]
    fn dropped_watches_are_forgotten() {
        let mut all = HintSenders::default();
        let (_, mut kept) = all.add(&Scope::Name(name(0)));
        for number in 0..10_000 {
            drop(all.add(&Scope::Name(name(number))));
            drop(all.add(&Scope::Prefix("n".parse().unwrap())));
        }
        assert!(all.all().count() <= 2 * MIN_SWEEP, "{}", all.all().count());
        all.changed(&name(0));
        let hint = kept.next().now_or_never().unwrap().unwrap().unwrap();
        assert_eq!(hint, Hint::Changed(name(0)));
    }
}
