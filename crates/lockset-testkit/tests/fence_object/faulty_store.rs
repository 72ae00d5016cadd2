//! A store in memory that can be made to fail, and that counts requests.

use std::fmt;
use std::sync::Mutex;

use async_trait::async_trait;
use futures_util::stream::BoxStream;
use object_store::memory::InMemory;
use object_store::path::Path;
use object_store::{
    CopyOptions, Error, GetOptions, GetResult, ListResult, MultipartUpload, ObjectMeta,
    ObjectStore, PutMode, PutMultipartOptions, PutOptions, PutPayload, PutResult, Result,
};
use tokio::sync::{mpsc, oneshot};

/// What the store does wrong.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) enum Fault {
    #[default]
    None,
    /// It replies to no request.
    Stopped,
    /// It has no conditional puts.
    NoConditions,
    /// It puts an object that must be new over one that is there.
    IgnoresNew,
    /// It puts an object although the one that is there has changed.
    IgnoresUnchanged,
    /// Its objects have no ETag.
    NoETag,
    /// Another client writes before every put.
    AlwaysChanged,
    /// The reply to this request is lost; `is_done` says whether the request was executed.
    FailsAt { request: usize, is_done: bool },
}

#[derive(Debug, Default)]
pub(crate) struct FaultyStore {
    inner: InMemory,
    state: Mutex<FaultyState>,
}

#[derive(Debug, Default)]
struct FaultyState {
    fault: Fault,
    requests: usize,
    hold: Option<(mpsc::Sender<()>, oneshot::Receiver<()>)>,
}

impl FaultyStore {
    pub(crate) fn set(&self, fault: Fault) {
        self.state.lock().unwrap().fault = fault;
    }

    /// How many gets and puts there were.
    pub(crate) fn requests(&self) -> usize {
        self.state.lock().unwrap().requests
    }

    /// The next put waits after it has been received, until the sender is used.
    pub(crate) fn hold_next_put(&self) -> (mpsc::Receiver<()>, oneshot::Sender<()>) {
        let ((held, is_held), (release, released)) = (mpsc::channel(1), oneshot::channel());
        self.state.lock().unwrap().hold = Some((held, released));
        (is_held, release)
    }

    /// Counts a request, and says whether its reply is lost.
    fn request(&self) -> Result<(Fault, bool)> {
        let mut state = self.state.lock().unwrap();
        let number = state.requests;
        state.requests += 1;
        match state.fault {
            Fault::Stopped => Err(lost()),
            Fault::FailsAt { request, is_done: false } if request == number => Err(lost()),
            Fault::FailsAt { request, is_done: true } if request == number => {
                Ok((state.fault, true))
            }
            fault => Ok((fault, false)),
        }
    }
}

fn lost() -> Error {
    Error::Generic { store: "faulty", source: "no reply".into() }
}

impl fmt::Display for FaultyStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a faulty store")
    }
}

#[async_trait]
impl ObjectStore for FaultyStore {
    async fn put_opts(
        &self,
        location: &Path,
        payload: PutPayload,
        mut options: PutOptions,
    ) -> Result<PutResult> {
        let (fault, is_lost) = self.request()?;
        let hold = self.state.lock().unwrap().hold.take();
        if let Some((held, released)) = hold {
            held.send(()).await.unwrap();
            released.await.unwrap();
        }
        options.mode = match (fault, options.mode) {
            (Fault::NoConditions, PutMode::Create | PutMode::Update(_)) => {
                let (operation, implementer) = ("a conditional put".into(), self.to_string());
                return Err(Error::NotImplemented { operation, implementer });
            }
            (Fault::AlwaysChanged, PutMode::Update(_)) => {
                let (path, source) = (location.to_string(), "changed".into());
                return Err(Error::Precondition { path, source });
            }
            (Fault::IgnoresNew, PutMode::Create) => PutMode::Overwrite,
            (Fault::IgnoresUnchanged, PutMode::Update(_)) => PutMode::Overwrite,
            (_, mode) => mode,
        };
        let mut put = self.inner.put_opts(location, payload, options).await?;
        if fault == Fault::NoETag {
            put.e_tag = None;
        }
        if is_lost { Err(lost()) } else { Ok(put) }
    }

    async fn get_opts(&self, location: &Path, options: GetOptions) -> Result<GetResult> {
        let (_, is_lost) = self.request()?;
        let found = self.inner.get_opts(location, options).await?;
        if is_lost { Err(lost()) } else { Ok(found) }
    }

    async fn put_multipart_opts(
        &self,
        location: &Path,
        options: PutMultipartOptions,
    ) -> Result<Box<dyn MultipartUpload>> {
        self.inner.put_multipart_opts(location, options).await
    }

    fn delete_stream(
        &self,
        locations: BoxStream<'static, Result<Path>>,
    ) -> BoxStream<'static, Result<Path>> {
        self.inner.delete_stream(locations)
    }

    fn list(&self, prefix: Option<&Path>) -> BoxStream<'static, Result<ObjectMeta>> {
        self.inner.list(prefix)
    }

    async fn list_with_delimiter(&self, prefix: Option<&Path>) -> Result<ListResult> {
        self.inner.list_with_delimiter(prefix).await
    }

    async fn copy_opts(&self, from: &Path, to: &Path, options: CopyOptions) -> Result<()> {
        self.inner.copy_opts(from, to, options).await
    }
}
