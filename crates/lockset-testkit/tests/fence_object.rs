//! The laws of a fence on objects, in memory and on a server that speaks the protocol of S3; stores
//! that cannot be used; requests that fail; bad input.
#![allow(clippy::unwrap_used, clippy::panic, reason = "tests")]

use std::sync::Arc;

use async_trait::async_trait;
use futures_util::TryStreamExt as _;
use lockset::fence::{FenceError, FenceMark, FencingToken, ObjectFence};
use lockset::{Name, Token};
use lockset_testkit::fence_laws::FencedRegister;
use lockset_testkit::fence_suite;
use lockset_testkit::stage::S3Server;
use object_store::aws::S3ConditionalPut;
use object_store::local::LocalFileSystem;
use object_store::path::Path;
use object_store::{ObjectStore, ObjectStoreExt as _};
use rustix::process::Signal;

#[path = "fence_object/faulty_store.rs"]
mod faulty_store;

use faulty_store::{Fault, FaultyStore};

/// Objects in a store, and what stops it.
struct Objects<S> {
    store: Arc<dyn ObjectStore>,
    fence: ObjectFence,
    server: S,
}

trait Server: Send + Sync {
    fn stop(&self);
    fn resume(&self);
}

impl Server for Arc<FaultyStore> {
    fn stop(&self) {
        self.set(Fault::Stopped);
    }

    fn resume(&self) {
        self.set(Fault::None);
    }
}

impl Server for S3Server {
    fn stop(&self) {
        self.signal(Signal::STOP);
    }

    fn resume(&self) {
        self.signal(Signal::CONT);
    }
}

impl Objects<Arc<FaultyStore>> {
    async fn in_memory() -> Self {
        let store = Arc::new(FaultyStore::default());
        let fence = ObjectFence::new(store.clone()).await.unwrap();
        Self { store: store.clone(), fence, server: store }
    }
}

impl Objects<S3Server> {
    async fn on_s3() -> Self {
        let server = S3Server::start();
        let store = Arc::new(server.store());
        let fence = ObjectFence::new(store.clone()).await.unwrap();
        Self { store, fence, server }
    }
}

#[async_trait]
impl<S: Server> FencedRegister for Objects<S> {
    async fn write(
        &self,
        resource: &Name,
        lock: &Name,
        token: &FencingToken,
        value: &str,
    ) -> Result<(), FenceError> {
        let path = Path::parse(resource.as_str()).unwrap();
        self.fence.put(&path, lock.clone(), token, value.to_owned()).await
    }

    async fn read(&self, resource: &Name) -> Option<String> {
        let object = self.store.get(&Path::parse(resource.as_str()).unwrap()).await.ok()?;
        let object = String::from_utf8(object.bytes().await.unwrap().to_vec()).unwrap();
        Some(object.split_once('\n').unwrap().1.to_owned())
    }

    async fn marks(&self) -> Result<Vec<FenceMark>, FenceError> {
        let listed: Result<Vec<_>, _> = self.store.list(None).try_collect().await;
        let listed = listed.map_err(|error| FenceError::store("test", error.to_string()))?;
        let mut marks = Vec::new();
        for object in listed {
            marks.extend(self.fence.marks(&object.location).await?);
        }
        marks.sort();
        Ok(marks)
    }

    /// The objects stay: both stores have them in memory.
    async fn restart(&self) {
        self.server.resume();
    }

    async fn stop(&self) {
        self.server.stop();
    }
}

mod in_memory {
    use super::*;
    fence_suite!(Objects::in_memory());
}

mod s3 {
    use super::*;
    fence_suite!(Objects::on_s3());
}

fn token(value: u64) -> FencingToken {
    FencingToken::new("orders", Token::new(value)).unwrap()
}

fn path() -> Path {
    Path::from("stock")
}

async fn raw(store: &dyn ObjectStore) -> Option<Vec<u8>> {
    let object = store.get(&path()).await.ok()?;
    Some(object.bytes().await.unwrap().to_vec())
}

async fn is_empty(store: &dyn ObjectStore) -> bool {
    store.list(None).try_collect::<Vec<_>>().await.unwrap().is_empty()
}

async fn rejected(store: Arc<dyn ObjectStore>) -> String {
    match ObjectFence::new(store).await {
        Err(error @ FenceError::Store { .. }) => error.to_string(),
        other => panic!("{other:?}"),
    }
}

#[tokio::test]
async fn a_store_that_does_not_check_conditions_is_rejected() {
    let cases = [
        (Fault::NoConditions, "has no conditional writes"),
        (Fault::IgnoresNew, "ignores the condition that an object is new"),
        (Fault::IgnoresUnchanged, "ignores the condition that an object is unchanged"),
        (Fault::NoETag, "returns no ETag"),
        (Fault::Stopped, "could not be tried"),
    ];
    for (fault, expected) in cases {
        let store = Arc::new(FaultyStore::default());
        store.set(fault);
        let error = rejected(store.clone()).await;
        assert!(error.contains(expected), "{fault:?}: {error}");
        store.set(Fault::None);
        assert!(is_empty(&*store).await, "{fault:?}: the object of the trial is still there");
    }
}

#[tokio::test]
async fn the_local_file_system_is_rejected() {
    let folder = tempfile::tempdir().unwrap();
    let store = Arc::new(LocalFileSystem::new_with_prefix(folder.path()).unwrap());
    let error = rejected(store.clone()).await;
    assert!(error.contains("has no conditional writes"), "{error}");
    assert!(is_empty(&*store).await);
}

#[tokio::test]
async fn s3_without_conditional_puts_is_rejected() {
    let server = S3Server::start();
    let client = S3Server::client_of(&server.url());
    let store = client.with_conditional_put(S3ConditionalPut::Disabled).build();
    let error = rejected(Arc::new(store.unwrap())).await;
    assert!(error.contains("has no conditional writes"), "{error}");
    assert!(is_empty(&server.store()).await);
}

#[tokio::test]
async fn a_write_costs_one_request_more() {
    let Objects { store, fence, server } = Objects::on_s3().await;
    let start = server.requests();
    store.put(&path(), "unguarded".into()).await.unwrap();
    assert_eq!(server.requests() - start, 1, "without the fence");
    store.delete(&path()).await.unwrap();
    let cases = [(5, "a new object"), (5, "the same token"), (6, "a greater token")];
    for (value, what) in cases {
        let start = server.requests();
        fence.put(&path(), "orders", token(value), "guarded").await.unwrap();
        assert_eq!(server.requests() - start, 2, "{what}");
    }
    let start = server.requests();
    assert!(fence.put(&path(), "orders", token(5), "late").await.unwrap_err().is_stale());
    assert_eq!(server.requests() - start, 1, "a stale token");
}

/// The ETag of S3 is a digest of the content. If two writes had the same one, a condition on it
/// would not notice the second.
#[tokio::test]
async fn no_two_writes_have_the_same_etag() {
    let Objects { store, fence, server: _server } = Objects::on_s3().await;
    let mut tags = std::collections::HashSet::new();
    for value in [5, 5, 6, 6] {
        fence.put(&path(), "orders", token(value), "same").await.unwrap();
        assert!(tags.insert(store.head(&path()).await.unwrap().e_tag.unwrap()));
    }
}

#[tokio::test]
async fn any_content_is_returned_as_it_was_written() {
    let Objects { store, fence, server: _server } = Objects::on_s3().await;
    assert_eq!(fence.get(&path()).await.unwrap(), None);
    assert_eq!(fence.marks(&path()).await.unwrap(), []);
    let header = raw_header(5);
    let contents = [
        Vec::new(),
        b"\n".to_vec(),
        b"lines\nand\0bytes\xff\n".to_vec(),
        header.into_bytes(),
        vec![b'x'; 3 << 20],
    ];
    for content in contents {
        fence.put(&path(), "orders", token(5), content.clone()).await.unwrap();
        assert_eq!(fence.get(&path()).await.unwrap(), Some(content.clone()));
        let object = raw(&*store).await.unwrap();
        let line = object.iter().position(|byte| *byte == b'\n').unwrap();
        assert_eq!(object[line + 1..], content, "other readers skip one line");
    }
}

fn raw_header(value: u64) -> String {
    format!("lockset-fence 1 0123456789abcdef orders={value}\n")
}

#[tokio::test]
async fn an_object_that_cannot_be_understood_is_not_replaced() {
    let header = raw_header(5);
    let cases = [
        ("day,orders\n".to_owned(), "was not written by the fence"),
        (String::new(), "cannot read"),
        ("lockset-fence".to_owned(), "was not written by the fence"),
        (header.replace("fence 1", "fence 2"), "use a newer Lockset"),
        (header.replace("fence 1", "fence 0"), "corrupt"),
        (header.replace("fence 1", "fence x"), "corrupt"),
        (header.replace('\n', ""), "corrupt"),
        (header.replace("orders=5", "orders=0"), "corrupt"),
        (header.replace("orders=5", "orders=9223372036854775808"), "corrupt"),
        (header.replace("orders=5", "orders=5 orders=6"), "corrupt"),
        (header.replace("orders=5", "../orders=5"), "corrupt"),
        (header.replace(" orders=5", ""), "corrupt"),
        (header.replace("orders=5", &"x".repeat(5000)), "corrupt"),
    ];
    let Objects { store, fence, .. } = Objects::in_memory().await;
    for (object, expected) in cases {
        store.put(&path(), object.clone().into()).await.unwrap();
        let errors = [
            fence.put(&path(), "orders", token(9), "new").await.unwrap_err(),
            fence.marks(&path()).await.unwrap_err(),
        ];
        for error in errors {
            assert!(matches!(error, FenceError::Store { .. }), "{object:.60}: {error:?}");
            assert!(error.to_string().contains(expected), "{object:.60}: {error}");
        }
        assert!(fence.get(&path()).await.is_err(), "{object:.60}");
        assert_eq!(raw(&*store).await.unwrap(), object.into_bytes());
    }
    store.put(&path(), header.into()).await.unwrap();
    fence.put(&path(), "orders", token(9), "new").await.unwrap();
}

#[tokio::test]
async fn bad_input_sends_no_request() {
    let Objects { fence, server, .. } = Objects::in_memory().await;
    let before = server.requests();
    let other = FencingToken::new("invoices", Token::new(9)).unwrap();
    let error = fence.put(&path(), "orders", &other, "new").await.unwrap_err();
    assert!(matches!(error, FenceError::WrongLock { .. }), "{error}");
    let long = Path::from("x".repeat(256));
    let error = fence.put(&long, "orders", token(9), "new").await.unwrap_err();
    assert!(matches!(error, FenceError::Invalid(_)), "{error}");
    let error = fence.put(&path(), "/orders", token(9), "new").await.unwrap_err();
    assert!(matches!(error, FenceError::Invalid(_)), "{error}");
    assert_eq!(server.requests(), before);
}

#[tokio::test]
async fn too_many_locks_are_an_error_and_the_marks_stay() {
    let Objects { store, fence, .. } = Objects::in_memory().await;
    let name = |number: usize| format!("{number:0>200}");
    let put = async |number: usize| {
        let token = FencingToken::new(name(number), Token::new(5)).unwrap();
        fence.put(&path(), name(number), &token, number.to_string()).await
    };
    let mut written = 0;
    let error = loop {
        match put(written).await {
            Ok(()) => written += 1,
            Err(error) => break error,
        }
    };
    assert!(error.to_string().contains("too many locks"), "{error}");
    assert!((10..30).contains(&written), "{written}");
    assert_eq!(fence.get(&path()).await.unwrap().unwrap(), (written - 1).to_string().into_bytes());
    let before = raw(&*store).await;
    for number in 0..written {
        let late = FencingToken::new(name(number), Token::new(4)).unwrap();
        let outcome = fence.put(&path(), name(number), &late, "late").await;
        assert!(outcome.unwrap_err().is_stale(), "{number}");
    }
    assert_eq!(raw(&*store).await, before);
}

/// A client that ends before or after any of its requests, or whose reply is lost.
#[tokio::test]
async fn a_write_that_breaks_off_leaves_the_old_or_the_new_object() {
    for is_done in [false, true] {
        for number in 0..2 {
            let Objects { store, fence, server } = Objects::in_memory().await;
            fence.put(&path(), "orders", token(5), "old").await.unwrap();
            server.set(Fault::FailsAt { request: server.requests() + number, is_done });
            let error = fence.put(&path(), "orders", token(6), "new").await.unwrap_err();
            assert!(matches!(error, FenceError::Store { .. }), "{error}");
            server.set(Fault::None);
            let (content, mark) = match (number, is_done) {
                (1, true) => ("new", 6),
                _ => ("old", 5),
            };
            assert_eq!(fence.get(&path()).await.unwrap().unwrap(), content.as_bytes());
            assert_eq!(fence.marks(&path()).await.unwrap()[0].token.get(), mark);
            // The client repeats it.
            fence.put(&path(), "orders", token(6), "new").await.unwrap();
            let late = fence.put(&path(), "orders", token(5), "late").await;
            assert!(late.unwrap_err().is_stale());
            assert!(raw(&*store).await.unwrap().ends_with(b"\nnew"));
        }
    }
}

/// Between the read and the write of A, B writes with a greater token.
#[tokio::test]
async fn a_write_between_the_two_requests_is_noticed() {
    for is_first in [true, false] {
        let Objects { store, fence, server } = Objects::in_memory().await;
        if !is_first {
            fence.put(&path(), "orders", token(4), "old").await.unwrap();
        }
        let (mut held, release) = server.hold_next_put();
        let of_a = tokio::spawn({
            let fence = fence.clone();
            async move { fence.put(&path(), "orders", token(5), "from A").await }
        });
        held.recv().await.unwrap();
        fence.put(&path(), "orders", token(6), "from B").await.unwrap();
        release.send(()).unwrap();
        assert!(of_a.await.unwrap().unwrap_err().is_stale());
        assert!(raw(&*store).await.unwrap().ends_with(b"\nfrom B"));
    }
}

#[tokio::test]
async fn an_object_that_changes_all_the_time_is_an_error_in_the_end() {
    let Objects { store, fence, server } = Objects::in_memory().await;
    fence.put(&path(), "orders", token(5), "old").await.unwrap();
    server.set(Fault::AlwaysChanged);
    let error = fence.put(&path(), "orders", token(6), "new").await.unwrap_err();
    assert!(error.to_string().contains("write again"), "{error}");
    assert!(raw(&*store).await.unwrap().ends_with(b"\nold"));
}

#[tokio::test]
async fn secrets_of_the_store_are_not_shown() {
    let server = S3Server::start();
    // The secret key of the client is `hunter2`.
    let fence = ObjectFence::new(Arc::new(server.store())).await.unwrap();
    assert!(!format!("{fence:?}").contains("hunter2"));
    drop(server);
    let error = fence.put(&path(), "orders", token(5), "new").await.unwrap_err();
    assert!(!format!("{error} {error:?}").contains("hunter2"), "{error:?}");
}
