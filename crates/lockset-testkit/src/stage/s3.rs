//! Starts a server that speaks the protocol of S3.

use std::net::TcpStream;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use async_trait::async_trait;
use http_body_util::BodyExt as _;
use hyper_util::rt::TokioIo;
use object_store::aws::{AmazonS3, AmazonS3Builder};
use object_store::client::{
    HttpClient, HttpConnector, HttpError, HttpErrorKind, HttpRequest, HttpResponse, HttpService,
};
use object_store::{BackoffConfig, ClientOptions, RetryConfig};
use rustix::process::{Pid, Signal, kill_process};

use super::port::free_port;
use crate::python::interpreter;

const BUCKET: &str = "bucket";
/// How long a client waits for a reply.
const TIMEOUT: Duration = Duration::from_secs(10);

/// The S3 server of moto with an empty bucket, on a free port of the loopback interface, killed
/// when dropped. Its objects are in memory.
#[derive(Debug)]
pub struct S3Server {
    folder: tempfile::TempDir,
    port: u16,
    child: Child,
}

impl S3Server {
    /// Starts a server and waits until it has a bucket.
    pub fn start() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let (port, log) = (free_port(), std::fs::File::create(folder.path().join("log")).unwrap());
        let child = Command::new(interpreter())
            .arg("-u")
            .arg(concat!(env!("CARGO_MANIFEST_DIR"), "/src/stage/s3_server.py"))
            .arg(port.to_string())
            .stdout(Stdio::null())
            .stderr(log)
            .spawn()
            .expect("Python with moto is needed: run `cargo xtask setup`");
        let mut server = Self { folder, port, child };
        let began = Instant::now();
        while !server.make_bucket() {
            let runs = matches!(server.child.try_wait(), Ok(None));
            assert!(runs, "the S3 server ended: {}", server.log());
            let is_late = began.elapsed() > Duration::from_secs(60);
            assert!(!is_late, "the S3 server is silent: {}", server.log());
            std::thread::sleep(Duration::from_millis(50));
        }
        server
    }

    fn make_bucket(&self) -> bool {
        use std::io::{Read as _, Write as _};
        let make = || {
            let mut stream = TcpStream::connect(("127.0.0.1", self.port))?;
            write!(stream, "PUT /{BUCKET} HTTP/1.0\r\nContent-Length: 0\r\n\r\n")?;
            let mut reply = String::new();
            stream.read_to_string(&mut reply)?;
            Ok::<_, std::io::Error>(reply)
        };
        make().is_ok_and(|reply| reply.split(' ').nth(1) == Some("200"))
    }

    /// Where the server is.
    pub fn url(&self) -> String {
        format!("http://127.0.0.1:{}", self.port)
    }

    /// A client of the server's bucket.
    pub fn store(&self) -> AmazonS3 {
        Self::store_at(&self.url())
    }

    /// A client of the bucket of the server that has this URL. It repeats no request.
    pub fn store_at(url: &str) -> AmazonS3 {
        Self::client_of(url).build().unwrap()
    }

    /// The settings of such a client.
    pub fn client_of(url: &str) -> AmazonS3Builder {
        let backoff = BackoffConfig::default();
        AmazonS3Builder::new()
            .with_endpoint(url)
            .with_bucket_name(BUCKET)
            .with_region("us-east-1")
            .with_access_key_id("test")
            .with_secret_access_key("hunter2")
            .with_allow_http(true)
            .with_http_connector(PlainHttp)
            .with_retry(RetryConfig { max_retries: 0, retry_timeout: TIMEOUT, backoff })
    }

    /// How many requests the server has replied to.
    pub fn requests(&self) -> usize {
        self.log().lines().filter(|line| line.contains(" HTTP/1.")).count()
    }

    /// Sends a signal to the server.
    pub fn signal(&self, signal: Signal) {
        kill_process(Pid::from_raw(self.child.id() as i32).unwrap(), signal).unwrap();
    }

    fn log(&self) -> String {
        let log: PathBuf = self.folder.path().join("log");
        std::fs::read_to_string(log).unwrap_or_default()
    }
}

impl Drop for S3Server {
    fn drop(&mut self) {
        // It may have ended already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// HTTP/1 without TLS, with a connection for each request: the server closes it after the reply.
#[derive(Debug)]
struct PlainHttp;

impl HttpConnector for PlainHttp {
    fn connect(&self, _: &ClientOptions) -> object_store::Result<HttpClient> {
        Ok(HttpClient::new(PlainHttp))
    }
}

#[async_trait]
impl HttpService for PlainHttp {
    async fn call(&self, request: HttpRequest) -> Result<HttpResponse, HttpError> {
        match tokio::time::timeout(TIMEOUT, send(request)).await {
            Ok(response) => {
                response.map_err(|error| HttpError::new_boxed(HttpErrorKind::Unknown, error))
            }
            Err(late) => Err(HttpError::new(HttpErrorKind::Timeout, late)),
        }
    }
}

type Failed = Box<dyn std::error::Error + Send + Sync>;

async fn send(mut request: HttpRequest) -> Result<HttpResponse, Failed> {
    let server = request.uri().authority().ok_or("the URL has no host")?.clone();
    let stream = tokio::net::TcpStream::connect(server.as_str()).await?;
    let (mut sender, connection) =
        hyper::client::conn::http1::handshake(TokioIo::new(stream)).await?;
    tokio::spawn(connection);
    request.headers_mut().insert("host", server.as_str().parse()?);
    let target = request.uri().path_and_query().ok_or("the URL has no path")?;
    *request.uri_mut() = target.as_str().parse()?;
    let (head, body) = sender.send_request(request).await?.into_parts();
    Ok(HttpResponse::from_parts(head, body.collect().await?.to_bytes().into()))
}
