//! Engines that wrap another engine and change some of its methods.

use std::fmt::Debug;
use std::sync::Arc;

use async_trait::async_trait;
use futures_core::stream::BoxStream;
use futures_util::StreamExt;
use lockset::clock::Clock;
use lockset::engine::{
    Admission, Amend, Capabilities, Claim, Engine, Event, FencedNode, Grant, Health, Hint, Renewal,
    Scope, Swap, Version, Wait,
};
use lockset::{Break, Error, Holder, LockState, Name, Prefix, Result, Token};
use tokio::sync::watch;

/// An engine on top of another. Each method delegates to the inner engine unless it is overridden.
#[async_trait]
#[expect(missing_docs, reason = "they are the methods of `Engine`")]
pub trait Layer: Debug + Send + Sync + 'static {
    fn inner(&self) -> &Arc<dyn Engine>;

    fn capabilities(&self) -> Capabilities {
        self.inner().capabilities()
    }

    fn identity(&self) -> String {
        self.inner().identity()
    }

    fn clock(&self) -> Clock {
        self.inner().clock()
    }

    async fn acquire(&self, claim: &Claim, wait: Wait) -> Result<Admission> {
        self.inner().acquire(claim, wait).await
    }

    async fn renew(&self, batch: &[(&Claim, &Grant)]) -> Vec<Result<Renewal>> {
        self.inner().renew(batch).await
    }

    async fn raise(&self, claim: &Claim, grant: &Grant, to: Token) -> Result<Grant> {
        fenced_node(self.inner())?.raise(claim, grant, to).await
    }

    async fn amend(&self, claim: &Claim, grant: &Grant, to: Amend) -> Result<Grant> {
        self.inner().amend(claim, grant, to).await
    }

    async fn adopt(&self, claim: &Claim, grant: &Grant, successor: &Claim) -> Result<Grant> {
        self.inner().adopt(claim, grant, successor).await
    }

    async fn release(
        &self,
        claim: &Claim,
        grant: &Grant,
        next: Option<&Claim>,
    ) -> Result<Option<Grant>> {
        self.inner().release(claim, grant, next).await
    }

    async fn withdraw(&self, claim: &Claim) -> Result<()> {
        self.inner().withdraw(claim).await
    }

    fn hints(&self, scope: &Scope) -> BoxStream<'static, Result<Hint>> {
        self.inner().hints(scope)
    }

    async fn inspect(&self, name: &Name) -> Result<LockState> {
        self.inner().inspect(name).await
    }

    async fn list(&self, prefix: &Prefix) -> Result<Vec<LockState>> {
        self.inner().list(prefix).await
    }

    async fn cell(&self, name: &Name, expect: Version, value: Option<Vec<u8>>) -> Result<Swap> {
        self.inner().cell(name, expect, value).await
    }

    async fn force_release(&self, name: &Name, how: Break) -> Result<Vec<Holder>> {
        self.inner().force_release(name, how).await
    }

    fn events(&self) -> BoxStream<'static, Event> {
        self.inner().events()
    }

    async fn health(&self) -> Result<Health> {
        fenced_node(self.inner())?.health().await
    }

    async fn close(&self) {
        self.inner().close().await;
    }
}

/// Makes an engine of a [`Layer`].
#[derive(Debug)]
pub struct Layered<L>(pub L);

#[async_trait]
impl<L: Layer> Engine for Layered<L> {
    fn capabilities(&self) -> Capabilities {
        self.0.capabilities()
    }

    fn identity(&self) -> String {
        self.0.identity()
    }

    fn clock(&self) -> Clock {
        self.0.clock()
    }

    async fn acquire(&self, claim: &Claim, wait: Wait) -> Result<Admission> {
        self.0.acquire(claim, wait).await
    }

    async fn renew(&self, batch: &[(&Claim, &Grant)]) -> Vec<Result<Renewal>> {
        self.0.renew(batch).await
    }

    async fn amend(&self, claim: &Claim, grant: &Grant, to: Amend) -> Result<Grant> {
        self.0.amend(claim, grant, to).await
    }

    async fn adopt(&self, claim: &Claim, grant: &Grant, successor: &Claim) -> Result<Grant> {
        self.0.adopt(claim, grant, successor).await
    }

    async fn release(
        &self,
        claim: &Claim,
        grant: &Grant,
        next: Option<&Claim>,
    ) -> Result<Option<Grant>> {
        self.0.release(claim, grant, next).await
    }

    async fn withdraw(&self, claim: &Claim) -> Result<()> {
        self.0.withdraw(claim).await
    }

    fn hints(&self, scope: &Scope) -> BoxStream<'static, Result<Hint>> {
        self.0.hints(scope)
    }

    async fn inspect(&self, name: &Name) -> Result<LockState> {
        self.0.inspect(name).await
    }

    async fn list(&self, prefix: &Prefix) -> Result<Vec<LockState>> {
        self.0.list(prefix).await
    }

    async fn cell(&self, name: &Name, expect: Version, value: Option<Vec<u8>>) -> Result<Swap> {
        self.0.cell(name, expect, value).await
    }

    async fn force_release(&self, name: &Name, how: Break) -> Result<Vec<Holder>> {
        self.0.force_release(name, how).await
    }

    fn events(&self) -> BoxStream<'static, Event> {
        self.0.events()
    }

    async fn close(&self) {
        self.0.close().await;
    }

    fn as_fenced_node(&self) -> Option<&dyn FencedNode> {
        self.0.inner().as_fenced_node().map(|_| self as &dyn FencedNode)
    }
}

#[async_trait]
impl<L: Layer> FencedNode for Layered<L> {
    async fn raise(&self, claim: &Claim, grant: &Grant, to: Token) -> Result<Grant> {
        self.0.raise(claim, grant, to).await
    }

    async fn health(&self) -> Result<Health> {
        self.0.health().await
    }
}

/// The engine as a node of a quorum.
///
/// # Errors
/// [`Error::Unsupported`] if it cannot be one.
pub fn fenced_node(engine: &Arc<dyn Engine>) -> Result<&dyn FencedNode> {
    let engine_name = engine.capabilities().engine;
    let what = "tokens chosen by the caller".to_owned();
    engine.as_fenced_node().ok_or(Error::Unsupported { engine: engine_name, what })
}

/// Decides whether a backend responds. Clones share one switch.
#[derive(Clone, Debug)]
pub struct FreezeSwitch(Arc<watch::Sender<bool>>);

impl Default for FreezeSwitch {
    fn default() -> Self {
        Self(Arc::new(watch::Sender::new(false)))
    }
}

impl FreezeSwitch {
    /// The backend stops responding.
    pub fn freeze(&self) {
        self.0.send_replace(true);
    }

    /// The backend responds again.
    pub fn thaw(&self) {
        self.0.send_replace(false);
    }

    async fn until_thawed(&self) {
        if !*self.0.borrow() {
            return;
        }
        // `self` owns the sender, so waiting cannot fail.
        let _ = self.0.subscribe().wait_for(|frozen| !frozen).await;
    }
}

/// An engine whose backend can be frozen. While frozen, requests are neither executed nor answered
/// and no events are delivered. Replies to requests executed before are delivered after the thaw.
#[derive(Debug)]
pub struct Freezable {
    /// The backend.
    pub inner: Arc<dyn Engine>,
    /// Freezes and thaws it.
    pub switch: FreezeSwitch,
}

impl Freezable {
    async fn through<T: Send>(&self, call: impl Future<Output = T> + Send) -> T {
        self.switch.until_thawed().await;
        let answer = call.await;
        self.switch.until_thawed().await;
        answer
    }
}

#[async_trait]
impl Layer for Freezable {
    fn inner(&self) -> &Arc<dyn Engine> {
        &self.inner
    }

    async fn acquire(&self, claim: &Claim, wait: Wait) -> Result<Admission> {
        self.through(self.inner.acquire(claim, wait)).await
    }

    async fn renew(&self, batch: &[(&Claim, &Grant)]) -> Vec<Result<Renewal>> {
        self.through(self.inner.renew(batch)).await
    }

    async fn raise(&self, claim: &Claim, grant: &Grant, to: Token) -> Result<Grant> {
        self.through(fenced_node(&self.inner)?.raise(claim, grant, to)).await
    }

    async fn amend(&self, claim: &Claim, grant: &Grant, to: Amend) -> Result<Grant> {
        self.through(self.inner.amend(claim, grant, to)).await
    }

    async fn adopt(&self, claim: &Claim, grant: &Grant, successor: &Claim) -> Result<Grant> {
        self.through(self.inner.adopt(claim, grant, successor)).await
    }

    async fn release(
        &self,
        claim: &Claim,
        grant: &Grant,
        next: Option<&Claim>,
    ) -> Result<Option<Grant>> {
        self.through(self.inner.release(claim, grant, next)).await
    }

    async fn withdraw(&self, claim: &Claim) -> Result<()> {
        self.through(self.inner.withdraw(claim)).await
    }

    fn hints(&self, scope: &Scope) -> BoxStream<'static, Result<Hint>> {
        freezable_stream(self.inner.hints(scope), self.switch.clone())
    }

    async fn inspect(&self, name: &Name) -> Result<LockState> {
        self.through(self.inner.inspect(name)).await
    }

    async fn list(&self, prefix: &Prefix) -> Result<Vec<LockState>> {
        self.through(self.inner.list(prefix)).await
    }

    async fn cell(&self, name: &Name, expect: Version, value: Option<Vec<u8>>) -> Result<Swap> {
        self.through(self.inner.cell(name, expect, value)).await
    }

    async fn force_release(&self, name: &Name, how: Break) -> Result<Vec<Holder>> {
        self.through(self.inner.force_release(name, how)).await
    }

    async fn health(&self) -> Result<Health> {
        self.through(fenced_node(&self.inner)?.health()).await
    }

    fn events(&self) -> BoxStream<'static, Event> {
        freezable_stream(self.inner.events(), self.switch.clone())
    }
}

fn freezable_stream<T: Send + 'static>(
    stream: BoxStream<'static, T>,
    switch: FreezeSwitch,
) -> BoxStream<'static, T> {
    stream
        .then(move |item| {
            let switch = switch.clone();
            async move {
                switch.until_thawed().await;
                item
            }
        })
        .boxed()
}
