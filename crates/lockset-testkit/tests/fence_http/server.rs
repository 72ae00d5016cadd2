//! A server behind the fence, requests to it over sockets, and registers that are written by them.

use std::collections::{BTreeMap, HashMap};
use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use async_trait::async_trait;
use axum::body::{Body, to_bytes};
use axum::http::request::Parts;
use axum::http::{Method, Request, Response, StatusCode};
use axum::{Extension, Router};
use lockset::fence::{
    FenceError, FenceLayer, FenceMark, FenceStore, FencingToken, TOKEN_HEADER, check,
};
use lockset::{Name, Token};
use lockset_testkit::fence_laws::FencedRegister;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Semaphore;
use tokio::task::JoinHandle;
use tower::{Layer, ServiceExt, service_fn};

/// Asks until it is true, for at most twenty seconds.
pub(crate) async fn until(what: &str, mut is_true: impl AsyncFnMut() -> bool) {
    let begun = Instant::now();
    while !is_true().await {
        assert!(begun.elapsed() < Duration::from_secs(20), "not within 20 s: {what}");
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
}

/// The mark of the only lock that has one.
pub(crate) async fn mark_of(store: &dyn FenceStore) -> Option<u64> {
    let marks = store.marks().await.unwrap();
    assert!(marks.len() <= 1, "{marks:?}");
    marks.first().map(|mark| mark.token.get())
}

#[derive(Debug)]
pub(crate) struct BrokenStore;

#[async_trait]
impl FenceStore for BrokenStore {
    async fn admit(&self, _: &Name, _: &Name, _: &FencingToken) -> Result<(), FenceError> {
        Err(FenceError::store("test", "db.internal does not reply"))
    }

    async fn marks(&self) -> Result<Vec<FenceMark>, FenceError> {
        Err(FenceError::store("test", "db.internal does not reply"))
    }
}

/// A handler that reports the tokens of the requests that reach it, and ends them when it is told.
#[derive(Clone)]
pub(crate) struct Handler {
    begun: Arc<Mutex<Vec<u64>>>,
    may_end: Arc<Semaphore>,
}

impl Handler {
    /// Requests end by themselves.
    pub(crate) fn open() -> Self {
        Self { begun: Arc::default(), may_end: Arc::new(Semaphore::new(Semaphore::MAX_PERMITS)) }
    }

    /// Requests end by [`let_one_end`](Handler::let_one_end).
    pub(crate) fn closed() -> Self {
        Self { begun: Arc::default(), may_end: Arc::new(Semaphore::new(0)) }
    }

    pub(crate) fn let_one_end(&self) {
        self.may_end.add_permits(1);
    }

    pub(crate) fn begun(&self) -> Vec<u64> {
        self.begun.lock().unwrap().clone()
    }

    pub(crate) async fn until_begun(&self, tokens: &[u64]) {
        until("requests reach the handler", async || self.begun() == tokens).await;
    }

    /// Whether this many requests reach the handler within `time`.
    pub(crate) async fn begins_within(&self, time: Duration, count: usize) -> bool {
        let reached = until("requests reach the handler", async || self.begun().len() >= count);
        tokio::time::timeout(time, reached).await.is_ok()
    }

    async fn handle(&self, token: Option<FencingToken>) -> String {
        let Some(token) = token else { return "no token".to_owned() };
        self.begun.lock().unwrap().push(token.token().get());
        self.may_end.acquire().await.unwrap().forget();
        token.to_string()
    }
}

/// A server on a free port, until it is dropped.
pub(crate) struct Server {
    pub(crate) address: SocketAddr,
    task: JoinHandle<()>,
}

impl Server {
    pub(crate) async fn start(fence: FenceLayer, handler: &Handler) -> Self {
        let handler = handler.clone();
        let handle = async move |token: Option<Extension<FencingToken>>| {
            handler.handle(token.map(|Extension(token)| token)).await
        };
        Self::serve(Router::new().fallback(handle).layer(fence)).await
    }

    async fn serve(router: Router) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let task = tokio::spawn(async move { axum::serve(listener, router).await.unwrap() });
        Self { address, task }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// A response.
#[derive(Debug)]
pub(crate) struct Answer {
    pub(crate) status: u16,
    pub(crate) content_type: Option<String>,
    pub(crate) body: String,
}

impl Answer {
    pub(crate) fn json(&self) -> serde_json::Value {
        serde_json::from_str(&self.body).unwrap()
    }
}

/// A request without a body. `headers` are complete lines.
pub(crate) fn request(method: &str, target: &str, headers: impl AsRef<[u8]>) -> Vec<u8> {
    request_with_body(method, target, headers, "")
}

fn request_with_body(method: &str, target: &str, headers: impl AsRef<[u8]>, body: &str) -> Vec<u8> {
    let head = format!("{method} {target} HTTP/1.1\r\nHost: test\r\nConnection: close\r\n");
    let length = format!("Content-Length: {}\r\n\r\n", body.len());
    [head.as_bytes(), headers.as_ref(), length.as_bytes(), body.as_bytes()].concat()
}

/// Sends a request over a connection of its own.
pub(crate) async fn exchange(address: SocketAddr, request: &[u8]) -> std::io::Result<Answer> {
    let mut socket = TcpStream::connect(address).await?;
    socket.write_all(request).await?;
    let mut reply = Vec::new();
    let read = socket.read_to_end(&mut reply);
    tokio::time::timeout(Duration::from_secs(20), read).await??;
    let reply = String::from_utf8(reply).unwrap();
    let (head, body) = reply.split_once("\r\n\r\n").unwrap_or_else(|| panic!("reply {reply:?}"));
    let status = head.split(' ').nth(1).unwrap().parse().unwrap();
    let headers = head.lines().filter_map(|line| line.split_once(": "));
    let mut types = headers.filter(|(name, _)| name.eq_ignore_ascii_case("content-type"));
    let content_type = types.next().map(|(_, value)| value.to_owned());
    Ok(Answer { status, content_type, body: body.to_owned() })
}

/// What survives a restart of the server.
#[derive(Debug, Default)]
struct Disk {
    marks: BTreeMap<(Name, Name), Token>,
    values: HashMap<Name, String>,
}

/// Marks on the disk, while it can be reached.
#[derive(Debug)]
struct DiskStore {
    disk: Arc<Mutex<Disk>>,
    stopped: AtomicBool,
}

impl DiskStore {
    async fn reach(&self) -> Result<(), FenceError> {
        // As if over a network, so that requests interleave.
        tokio::time::sleep(Duration::from_micros(200)).await;
        match self.stopped.load(Ordering::SeqCst) {
            true => Err(FenceError::store("test", "it is stopped")),
            false => Ok(()),
        }
    }
}

#[async_trait]
impl FenceStore for DiskStore {
    async fn admit(
        &self,
        resource: &Name,
        lock: &Name,
        token: &FencingToken,
    ) -> Result<(), FenceError> {
        self.reach().await?;
        let marks = &mut self.disk.lock().unwrap().marks;
        let key = (resource.clone(), lock.clone());
        check(resource, lock, token, marks.get(&key).copied())?;
        marks.insert(key, token.token());
        Ok(())
    }

    async fn marks(&self) -> Result<Vec<FenceMark>, FenceError> {
        self.reach().await?;
        let marks = &self.disk.lock().unwrap().marks;
        let marks = marks.iter().map(|((resource, lock), token)| {
            FenceMark::new(resource.clone(), lock.clone(), *token)
        });
        Ok(marks.collect())
    }
}

/// Registers of an HTTP server: `PUT /resource?lock`, `GET /resource`.
pub(crate) struct HttpRegister {
    disk: Arc<Mutex<Disk>>,
    running: tokio::sync::RwLock<(Server, Arc<DiskStore>)>,
}

impl HttpRegister {
    pub(crate) async fn new() -> Self {
        let disk = Arc::default();
        let running = tokio::sync::RwLock::new(start(&disk).await);
        Self { disk, running }
    }

    async fn send(&self, request: &[u8]) -> Answer {
        let address = self.running.read().await.0.address;
        exchange(address, request).await.unwrap()
    }
}

async fn start(disk: &Arc<Mutex<Disk>>) -> (Server, Arc<DiskStore>) {
    let store = Arc::new(DiskStore { disk: disk.clone(), stopped: AtomicBool::new(false) });
    let fences: Arc<Mutex<HashMap<Name, FenceLayer>>> = Arc::default();
    let (disk, marks) = (disk.clone(), store.clone());
    let registers = service_fn(move |request: Request<Body>| {
        let resource = decoded(request.uri().path().strip_prefix('/').unwrap());
        let mut fences = fences.lock().unwrap();
        let fence = fences.entry(resource.clone()).or_insert_with(|| {
            let fence = FenceLayer::new(marks.clone(), resource.clone()).unwrap();
            fence.lock_by(|parts: &Parts| parts.uri.query().map(decoded))
        });
        let disk = disk.clone();
        let register = service_fn(move |request| handle(disk.clone(), resource.clone(), request));
        fence.layer(register).oneshot(request)
    });
    (Server::serve(Router::new().fallback_service(registers)).await, store)
}

async fn handle(
    disk: Arc<Mutex<Disk>>,
    resource: Name,
    request: Request<Body>,
) -> Result<Response<Body>, std::convert::Infallible> {
    let mut response = Response::new(Body::empty());
    if request.method() == Method::GET {
        match disk.lock().unwrap().values.get(&resource) {
            Some(value) => *response.body_mut() = Body::from(value.clone()),
            None => *response.status_mut() = StatusCode::NOT_FOUND,
        }
        return Ok(response);
    }
    let token = request.extensions().get::<FencingToken>().unwrap().token().get();
    let value = to_bytes(request.into_body(), 10_000).await.unwrap();
    let value = String::from_utf8(value.to_vec()).unwrap();
    // The lower the token, the longer: without an order, lower ones would write last.
    tokio::time::sleep(Duration::from_millis(9 - token % 9)).await;
    disk.lock().unwrap().values.insert(resource, value);
    Ok(response)
}

#[async_trait]
impl FencedRegister for HttpRegister {
    async fn write(
        &self,
        resource: &Name,
        lock: &Name,
        token: &FencingToken,
        value: &str,
    ) -> Result<(), FenceError> {
        let target = format!("/{}?{}", encoded(resource), encoded(lock));
        let header = format!("{TOKEN_HEADER}: {token}\r\n");
        let answer = self.send(&request_with_body("PUT", &target, header, value)).await;
        match answer.status {
            200 => Ok(()),
            409 => {
                let problem = answer.json();
                let field = |name: &str| problem[name].as_str().unwrap().to_owned();
                Err(FenceError::Stale {
                    resource: field("resource").parse().unwrap(),
                    lock: field("lock").parse().unwrap(),
                    token: field("token").parse().unwrap(),
                    seen: field("seen").parse().unwrap(),
                })
            }
            403 => Err(FenceError::WrongLock {
                resource: resource.clone(),
                expected: lock.clone(),
                given: token.lock().clone(),
            }),
            503 => Err(FenceError::store("http", answer.body)),
            _ => panic!("{answer:?}"),
        }
    }

    async fn read(&self, resource: &Name) -> Option<String> {
        let answer = self.send(&request("GET", &format!("/{}", encoded(resource)), "")).await;
        (answer.status == 200).then_some(answer.body)
    }

    async fn marks(&self) -> Result<Vec<FenceMark>, FenceError> {
        let store = self.running.read().await.1.clone();
        store.marks().await
    }

    async fn restart(&self) {
        *self.running.write().await = start(&self.disk).await;
    }

    async fn stop(&self) {
        self.running.read().await.1.stopped.store(true, Ordering::SeqCst);
    }
}

/// A name in hexadecimal digits, for a path.
fn encoded(name: &Name) -> String {
    name.as_str().bytes().map(|byte| format!("{byte:02x}")).collect()
}

fn decoded(text: &str) -> Name {
    let digits = text.as_bytes().chunks(2).map(|pair| std::str::from_utf8(pair).unwrap());
    let bytes = digits.map(|pair| u8::from_str_radix(pair, 16).unwrap());
    String::from_utf8(bytes.collect()).unwrap().parse().unwrap()
}
