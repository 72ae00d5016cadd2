//! Objects of S3 and the like that are written only with a token that is not stale.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;

use object_store::path::Path;
use object_store::{
    Error as ObjectError, GetOptions, GetResult, ObjectStore, ObjectStoreExt as _, PutMode,
    PutPayload, UpdateVersion,
};

use crate::error::Error;
use crate::name::Name;
use crate::token::Token;

use super::{FenceError, FenceMark, FencingToken, check};

const STORE: &str = "object storage";
/// What every guarded object begins with; the version follows.
const MAGIC: &str = "lockset-fence ";
const VERSION: u64 = 1;
/// How long the first line of an object may be.
const HEADER_LIMIT: usize = 4096;
/// How often a write is decided anew because another one came first.
const ATTEMPTS: u32 = 64;

/// Objects that are written only with a token that is not stale.
///
/// The resource is the object: its path. A write reads the marks, then replaces the object on the
/// condition that it is unchanged (`If-Match`): one request more than without the fence. If another
/// write came between, it decides anew.
///
/// The marks are the first line of the object, before the content; [`get`](ObjectFence::get)
/// returns the content alone, and other readers skip one line. Metadata would leave the content as
/// it is, but does not serve: the ETag of S3 is a digest of the content, so the same content with a
/// greater mark would still meet the condition of a stale write. The line also contains a random
/// number, so that no two writes have the same ETag.
///
/// ```
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let locks = lockset::Lockset::connect("memory:").await?;
/// use std::sync::Arc;
/// use lockset::fence::ObjectFence;
/// use object_store::{memory::InMemory, path::Path};
///
/// let fence = ObjectFence::new(Arc::new(InMemory::new())).await?;
/// let mutex = locks.mutex("reports/daily")?;
/// let guard = mutex.lock().await?;
/// let path = Path::from("reports/daily.csv");
/// fence.put(&path, mutex.name(), &guard, "day,orders\n").await?;
/// assert_eq!(fence.get(&path).await?.as_deref(), Some(&b"day,orders\n"[..]));
/// # Ok(()) }
/// ```
///
/// # What it does not cover
/// Each object has marks of its own: a token that was seen by one is not known to another. An
/// object that is deleted loses its marks; to empty it, write empty content. An object that was not
/// written by the fence is rejected, not replaced. A path has at most 255 bytes, like a [`Name`].
/// Multipart uploads are not supported.
#[derive(Clone)]
pub struct ObjectFence {
    store: Arc<dyn ObjectStore>,
}

/// The first line of an object: the marks by lock.
#[derive(Default)]
struct ObjectHeader {
    marks: BTreeMap<Name, Token>,
}

/// What a store must not do.
enum ProbeFailure {
    Error(ObjectError),
    Ignored(&'static str),
}

impl From<ObjectError> for ProbeFailure {
    fn from(error: ObjectError) -> Self {
        Self::Error(error)
    }
}

impl ObjectFence {
    /// The fence of this store. It is tried with an object below `lockset-fence-probe/`, which is
    /// deleted again: a store that does not check conditions cannot be used.
    ///
    /// # Errors
    /// [`FenceError::Store`] if the store does not support conditional writes, or fails.
    ///
    /// # Cancel safety
    /// A call that is cancelled may leave the object.
    pub async fn new(store: Arc<dyn ObjectStore>) -> Result<Self, FenceError> {
        let path = Path::from(format!("lockset-fence-probe/{}", random()));
        let outcome = probe(&*store, &path).await;
        let deleted = store.delete(&path).await;
        match outcome {
            Ok(()) => {
                let what = "cannot delete the object that the store was tried with";
                deleted.map_err(|error| FenceError::store_error(STORE, what, error))?;
                Ok(Self { store })
            }
            Err(ProbeFailure::Ignored(what)) => {
                let what = format!("{store} {what}: use a store with conditional writes");
                Err(FenceError::store(STORE, what))
            }
            Err(ProbeFailure::Error(error)) => {
                let what = match error {
                    ObjectError::NotImplemented { .. } | ObjectError::NotSupported { .. } => {
                        "the store has no conditional writes, use another one"
                    }
                    _ => "the store could not be tried",
                };
                Err(FenceError::store_error(STORE, what, error))
            }
        }
    }

    /// Replaces the content of an object if the token is admitted.
    ///
    /// # Errors
    /// [`FenceError::Stale`], [`FenceError::WrongLock`] and [`FenceError::Invalid`]: the object was
    /// not replaced, or by a newer holder since. [`FenceError::Store`]: it may have been replaced,
    /// if the store did not reply.
    ///
    /// # Cancel safety
    /// A call that is cancelled may have replaced the object.
    pub async fn put(
        &self,
        path: &Path,
        lock: impl TryInto<Name, Error: Into<Error>>,
        token: impl Into<FencingToken>,
        content: impl Into<PutPayload>,
    ) -> Result<(), FenceError> {
        let (resource, lock) = (resource_of(path)?, lock.try_into().map_err(Into::into)?);
        let (token, content) = (token.into(), content.into());
        token.check_lock(&resource, &lock)?;
        for _ in 0..ATTEMPTS {
            let (mut header, mode) = match self.read(path).await? {
                None => (ObjectHeader::default(), PutMode::Create),
                Some((header, version)) => (header, PutMode::Update(version)),
            };
            check(&resource, &lock, &token, header.marks.get(&lock).copied())?;
            header.marks.insert(lock.clone(), token.token());
            let line = PutPayload::from(header.line(path)?);
            let object: PutPayload = line.iter().chain(content.iter()).cloned().collect();
            match self.store.put_opts(path, object, mode.into()).await {
                Ok(_) => return Ok(()),
                // Another write came first.
                Err(ObjectError::AlreadyExists { .. } | ObjectError::Precondition { .. }) => {}
                Err(error) => return Err(failed("write", path, error)),
            }
        }
        let what = format!("`{path}` changed {ATTEMPTS} times before it was written: write again");
        Err(FenceError::store(STORE, what))
    }

    /// The content of an object, without its marks; `None` if there is no object.
    ///
    /// # Errors
    /// [`FenceError::Store`] if the store fails, or the object was not written by the fence.
    ///
    /// # Cancel safety
    /// It only reads.
    pub async fn get(&self, path: &Path) -> Result<Option<Vec<u8>>, FenceError> {
        let Some(found) = self.find(path, GetOptions::default()).await? else { return Ok(None) };
        let object = found.bytes().await.map_err(|error| failed("read", path, error))?;
        let (_, content) = ObjectHeader::parse(&object).map_err(|what| unusable(path, &what))?;
        Ok(Some(content.to_vec()))
    }

    /// The marks of an object, in the order of the lock names.
    ///
    /// # Errors
    /// As [`get`](Self::get).
    ///
    /// # Cancel safety
    /// It only reads.
    pub async fn marks(&self, path: &Path) -> Result<Vec<FenceMark>, FenceError> {
        let resource = resource_of(path)?;
        let found = self.read(path).await?;
        let marks = found.map(|(header, _)| header.marks).unwrap_or_default();
        let marks = marks.into_iter().map(|(lock, token)| (resource.clone(), lock, token));
        Ok(marks.map(|(resource, lock, token)| FenceMark::new(resource, lock, token)).collect())
    }

    async fn read(&self, path: &Path) -> Result<Option<(ObjectHeader, UpdateVersion)>, FenceError> {
        let options = GetOptions::default().with_range(Some(0..HEADER_LIMIT as u64));
        let Some(found) = self.find(path, options).await? else { return Ok(None) };
        let meta = &found.meta;
        let version = UpdateVersion { e_tag: meta.e_tag.clone(), version: meta.version.clone() };
        let start = found.bytes().await.map_err(|error| failed("read", path, error))?;
        let (header, _) = ObjectHeader::parse(&start).map_err(|what| unusable(path, &what))?;
        Ok(Some((header, version)))
    }

    async fn find(
        &self,
        path: &Path,
        options: GetOptions,
    ) -> Result<Option<GetResult>, FenceError> {
        match self.store.get_opts(path, options).await {
            Ok(found) => Ok(Some(found)),
            Err(ObjectError::NotFound { .. }) => Ok(None),
            Err(error) => Err(failed("read", path, error)),
        }
    }
}

/// Without the settings of the store, which may contain secrets.
impl fmt::Debug for ObjectFence {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let store = self.store.to_string();
        f.debug_struct("ObjectFence").field("store", &store).finish()
    }
}

impl ObjectHeader {
    /// The marks, and the content that follows them; or why there are none.
    fn parse(object: &[u8]) -> Result<(Self, &[u8]), String> {
        const FOREIGN: &str =
            "was not written by the fence: move it away, or write to another path";
        let rest = object.strip_prefix(MAGIC.as_bytes()).ok_or(FOREIGN)?;
        let corrupt = || "has marks that are corrupt: restore it".to_owned();
        let limit = rest.len().min(HEADER_LIMIT - MAGIC.len());
        let end = rest[..limit].iter().position(|byte| *byte == b'\n').ok_or_else(corrupt)?;
        let line = std::str::from_utf8(&rest[..end]).map_err(|_| corrupt())?;
        let mut words = line.split(' ');
        let version: Option<u64> = words.next().and_then(|version| version.parse().ok());
        match version {
            Some(VERSION) => {}
            Some(version) if version > VERSION => {
                return Err(format!("has marks of version {version}: use a newer Lockset"));
            }
            _ => return Err(corrupt()),
        }
        // The random number.
        words.next().ok_or_else(corrupt)?;
        let mut marks = BTreeMap::new();
        for word in words {
            let mark: FencingToken = word.parse().map_err(|_| corrupt())?;
            if marks.insert(mark.lock().clone(), mark.token()).is_some() {
                return Err(corrupt());
            }
        }
        match marks.is_empty() {
            true => Err(corrupt()),
            false => Ok((Self { marks }, &rest[end + 1..])),
        }
    }

    fn line(&self, path: &Path) -> Result<String, FenceError> {
        let mut line = format!("{MAGIC}{VERSION} {}", random());
        for (lock, token) in &self.marks {
            line += &format!(" {}", FencingToken::new(lock.clone(), *token)?);
        }
        line.push('\n');
        match line.len() <= HEADER_LIMIT {
            true => Ok(line),
            false => Err(unusable(path, "is written under too many locks: use one lock")),
        }
    }
}

/// Whether the store checks the conditions of a write.
async fn probe(store: &dyn ObjectStore, path: &Path) -> Result<(), ProbeFailure> {
    let put = |mode: PutMode| store.put_opts(path, random().into(), mode.into());
    let first: UpdateVersion = put(PutMode::Create).await?.into();
    if first.e_tag.is_none() && first.version.is_none() {
        return Err(ProbeFailure::Ignored("returns no ETag"));
    }
    match put(PutMode::Create).await {
        Err(ObjectError::AlreadyExists { .. }) => {}
        Err(error) => return Err(error.into()),
        Ok(_) => return Err(ProbeFailure::Ignored("ignores the condition that an object is new")),
    }
    put(PutMode::Update(first.clone())).await?;
    match put(PutMode::Update(first)).await {
        Err(ObjectError::Precondition { .. }) => Ok(()),
        Err(error) => Err(error.into()),
        Ok(_) => Err(ProbeFailure::Ignored("ignores the condition that an object is unchanged")),
    }
}

fn random() -> String {
    format!("{:032x}", rand::random::<u128>())
}

fn resource_of(path: &Path) -> Result<Name, FenceError> {
    Ok(path.as_ref().parse()?)
}

fn unusable(path: &Path, what: &str) -> FenceError {
    FenceError::store(STORE, format!("`{path}` {what}"))
}

fn failed(verb: &str, path: &Path, error: ObjectError) -> FenceError {
    FenceError::store_error(STORE, &format!("cannot {verb} `{path}`"), error)
}
