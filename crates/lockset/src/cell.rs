//! Small shared state changed by compare-and-set: what latches and barriers are made of.
//!
//! A change is a pure function of what the cell holds and bears an id of its own. So a request
//! without a reply is repeated: the cell itself tells whether the change was made before.
//! Nothing is ever counted twice.

use std::sync::Arc;
use std::time::Duration;

use futures_util::StreamExt;
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::client::{Client, InFlight, REQUEST_BACKOFF};
use crate::clock::Moment;
use crate::engine::{Cell, Scope, Swap};
use crate::error::{Error, Result};
use crate::name::Name;
use crate::report::report;

/// How often a change is tried again after others were faster, before it is called unreachable.
const MOST_TRIES: usize = 10_000;
/// How long a change without a reply is repeated.
const CHANGE_FOR: Duration = Duration::from_secs(5);

/// A cell with content of type `T`.
#[derive(Clone, Debug)]
pub(crate) struct SharedCell {
    client: Arc<Client>,
    pub(crate) name: Name,
}

/// What a change makes of the content.
pub(crate) enum Change<T, R> {
    /// Write this; return that once it is written.
    Write(T, R),
    /// Nothing to write.
    Keep(R),
}

impl SharedCell {
    pub(crate) fn new(client: Arc<Client>, name: Name) -> Result<Self> {
        if !client.capabilities.cells {
            let what = "latches and barriers".to_owned();
            return Err(Error::Unsupported { engine: client.capabilities.engine, what });
        }
        Ok(Self { client, name })
    }

    /// The content now.
    pub(crate) async fn read<T: DeserializeOwned>(&self) -> Result<Option<T>> {
        self.client.check_usable()?;
        let state = self.client.engine.inspect(&self.name).await?;
        self.content(&state.cell.unwrap_or_default())
    }

    /// Changes the content. `change` sees what is there and must recognise its own earlier work.
    pub(crate) async fn change<T, R>(
        &self,
        change: impl FnMut(Option<T>) -> Result<Change<T, R>>,
    ) -> Result<R>
    where
        T: Serialize + DeserializeOwned,
    {
        self.client.check_usable()?;
        self.clean_up(change).await
    }

    /// As [`change`](SharedCell::change), also while the client closes.
    pub(crate) async fn clean_up<T, R>(
        &self,
        mut change: impl FnMut(Option<T>) -> Result<Change<T, R>>,
    ) -> Result<R>
    where
        T: Serialize + DeserializeOwned,
    {
        let (give_up, mut backoff) = (self.client.clock.now() + CHANGE_FOR, REQUEST_BACKOFF);
        loop {
            let changed = self.change_once(&mut change).await;
            // Whether it was done is seen when it is tried again.
            let is_unclear = changed.as_ref().is_err_and(Error::is_retryable);
            if !is_unclear || !backoff.pause_before(&self.client.clock, give_up).await {
                return changed;
            }
        }
    }

    async fn change_once<T, R>(
        &self,
        change: &mut impl FnMut(Option<T>) -> Result<Change<T, R>>,
    ) -> Result<R>
    where
        T: Serialize + DeserializeOwned,
    {
        let mut found = self.client.engine.inspect(&self.name).await?.cell.unwrap_or_default();
        for _ in 0..MOST_TRIES {
            let (content, answer) = match change(self.content(&found)?)? {
                Change::Keep(answer) => return Ok(answer),
                Change::Write(content, answer) => (content, answer),
            };
            let bytes = serde_json::to_vec(&content).map_err(|error| self.damaged(&error))?;
            match self.client.engine.cell(&self.name, found.version, Some(bytes)).await? {
                Swap::Done(_) => return Ok(answer),
                Swap::Found(cell) => found = cell,
            }
        }
        let what = format!("`{}` changes too often to be changed", self.name);
        let engine = self.client.capabilities.engine;
        Err(Error::Unreachable { engine, what, retryable: true, source: None })
    }

    /// Removes the cell.
    pub(crate) async fn remove(&self) -> Result<()> {
        self.client.check_usable()?;
        self.client.retry(CHANGE_FOR, || self.remove_once()).await
    }

    async fn remove_once(&self) -> Result<()> {
        let mut found = self.client.engine.inspect(&self.name).await?.cell.unwrap_or_default();
        while found != Cell::default() {
            match self.client.engine.cell(&self.name, found.version, None).await? {
                Swap::Done(_) => break,
                Swap::Found(cell) => found = cell,
            }
        }
        Ok(())
    }

    /// Waits until `enough` returns something for the content. Waiting only reads, so it goes on
    /// whatever happens to the connection.
    pub(crate) async fn wait<T: DeserializeOwned, R>(
        &self,
        mut enough: impl FnMut(Option<T>) -> Result<Option<R>>,
    ) -> Result<R> {
        self.client.check_usable()?;
        let scope = Scope::Name(self.name.clone());
        let (mut states, mut backoff) = (self.client.watch(scope.clone()), REQUEST_BACKOFF);
        loop {
            let state = tokio::select! {
                biased;
                state = states.next() => state,
                () = self.client.closed() => return Err(Error::Closed),
            };
            match state {
                Some(Ok(state)) => {
                    backoff.reset();
                    let content = self.content(&state.cell.unwrap_or_default())?;
                    if let Some(answer) = enough(content)? {
                        return Ok(answer);
                    }
                }
                Some(Err(error)) if !error.is_retryable() => return Err(error),
                unclear => {
                    self.client.check_usable()?;
                    if let Some(Err(error)) = unclear {
                        report!(debug, name = self.name, error = error, "a watch begins again");
                    }
                    backoff.pause().await;
                    states = self.client.watch(scope.clone());
                }
            }
        }
    }

    pub(crate) fn now(&self) -> Moment {
        self.client.clock.now()
    }

    /// Does something in the background.
    pub(crate) fn in_background(&self, job: impl Future<Output = ()> + Send + 'static) {
        if !self.client.is_forked() {
            self.client.keeper.run(job);
        }
    }

    /// Starts an operation with cleanup to do on drop.
    pub(crate) fn start(&self) -> Result<InFlight<'_>> {
        self.client.start()
    }

    pub(crate) fn conflict(&self, why: String) -> Error {
        Error::Conflict { name: self.name.clone(), why }
    }

    fn content<T: DeserializeOwned>(&self, cell: &Cell) -> Result<Option<T>> {
        if cell.value.is_empty() {
            return Ok(None);
        }
        serde_json::from_slice(&cell.value).map(Some).map_err(|error| self.damaged(&error))
    }

    fn damaged(&self, error: &serde_json::Error) -> Error {
        self.conflict(format!("its cell holds something else ({error})"))
    }
}
