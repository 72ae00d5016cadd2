//! The fence in front of an HTTP service: a real server and requests over sockets.
#![allow(clippy::unwrap_used, clippy::panic, reason = "tests")]

#[path = "fence_http/server.rs"]
mod server;

use std::sync::Arc;
use std::time::{Duration, Instant};

use axum::http::{Request, Response};
use lockset::fence::{
    FenceClientLayer, FenceLayer, FenceStore, FencingToken, FileFence, MemoryFence,
    PostgresFenceStore, RedisFenceStore, SqliteFenceStore, TOKEN_HEADER,
};
use lockset::{Lockset, Name, Token};
use lockset_testkit::stage::{PostgresServer, RedisServer};
use tower::{Layer, ServiceExt, service_fn};

use self::server::{Answer, BrokenStore, Handler, Server, exchange, mark_of, request};

const LOCK: &str = "orders/42";

fn fenced(store: &Arc<MemoryFence>) -> FenceLayer {
    FenceLayer::new(store.clone(), "stock").unwrap().lock(LOCK).unwrap()
}

fn header(token: u64) -> String {
    format!("{TOKEN_HEADER}: {LOCK}={token}\r\n")
}

async fn write(server: &Server, token: u64) -> Answer {
    exchange(server.address, &request("PUT", "/", header(token))).await.unwrap()
}

fn assert_problem(answer: &Answer, status: u16, kind: &str, says: &str) {
    assert_eq!(answer.status, status, "{answer:?}");
    assert_eq!(answer.content_type.as_deref(), Some("application/problem+json"));
    let problem = answer.json();
    assert_eq!(problem["type"], format!("urn:lockset:{kind}"), "{problem}");
    assert_eq!(problem["status"], status, "{problem}");
    assert_eq!(problem["resource"], "stock", "{problem}");
    assert!(!problem["title"].as_str().unwrap().is_empty(), "{problem}");
    assert!(problem["detail"].as_str().unwrap().contains(says), "{problem}");
}

#[tokio::test]
async fn a_stale_token_is_a_conflict() {
    let (store, handler) = (Arc::new(MemoryFence::new()), Handler::open());
    let server = Server::start(fenced(&store), &handler).await;
    let greatest = i64::MAX as u64;
    for token in [8, 8, 9_007_199_254_740_993, greatest] {
        assert_eq!(write(&server, token).await.status, 200);
    }
    let answer = write(&server, 9_007_199_254_740_993).await;
    assert_problem(&answer, 409, "stale-token", "is stale");
    // As strings: the numbers are too great for JavaScript.
    let problem = answer.json();
    assert_eq!(problem["lock"], LOCK);
    assert_eq!(problem["token"], "9007199254740993");
    assert_eq!(problem["seen"], greatest.to_string());
    assert_eq!(handler.begun(), [8, 8, 9_007_199_254_740_993, greatest]);
}

#[tokio::test]
async fn the_marks_can_be_in_any_store() {
    let folder = tempfile::tempdir().unwrap();
    let (redis, postgres) = (RedisServer::start(), PostgresServer::start());
    let stores: [Arc<dyn FenceStore>; 4] = [
        Arc::new(FileFence::open(folder.path().join("marks")).unwrap()),
        Arc::new(SqliteFenceStore::open(folder.path().join("marks.db")).unwrap()),
        Arc::new(RedisFenceStore::connect(&redis.url()).await.unwrap()),
        Arc::new(PostgresFenceStore::connect(&postgres.url()).await.unwrap()),
    ];
    for store in stores {
        // The service is started twice: the marks are not in it.
        for (token, status) in [(8, 200), (7, 409)] {
            let (layer, handler) = (FenceLayer::new(store.clone(), "stock"), Handler::open());
            let server = Server::start(layer.unwrap().lock(LOCK).unwrap(), &handler).await;
            assert_eq!(write(&server, token).await.status, status, "{store:?}");
        }
    }
}

#[tokio::test]
async fn a_missing_token_is_a_precondition_required() {
    let (store, handler) = (Arc::new(MemoryFence::new()), Handler::open());
    let server = Server::start(fenced(&store), &handler).await;
    for method in ["PUT", "POST", "DELETE", "PATCH", "PURGE"] {
        let answer = exchange(server.address, &request(method, "/", "")).await.unwrap();
        assert_problem(&answer, 428, "token-required", "lockset-token: name=token");
    }
    assert!(handler.begun().is_empty());
}

#[tokio::test]
async fn what_is_not_one_token_is_a_bad_request() {
    let (store, handler) = (Arc::new(MemoryFence::new()), Handler::open());
    let server = Server::start(fenced(&store), &handler).await;
    let long = format!("{}=1", "x".repeat(256));
    let longer = format!("{}=1", "%78".repeat(400));
    let wrong: [(&[u8], &str); 14] = [
        (b"", "form `name=token`"),
        (b"orders/42", "form `name=token`"),
        (b"=7", "empty"),
        (b"orders/42=", "whole number"),
        (b"orders/42=0", "whole number"),
        (b"orders/42=-1", "whole number"),
        (b"orders/42=+1", "whole number"),
        (b"orders/42=9223372036854775808", "whole number"),
        (b"orders/42=7,orders/43=3", "one token"),
        (b"orders/42=7, orders/42=7", "one token"),
        (b"orders/\xc3\xa4=7", "ASCII"),
        (b"orders/%ff=7", "UTF-8"),
        (long.as_bytes(), "at most 255 fit"),
        (longer.as_bytes(), "at most 1024 fit"),
    ];
    for (value, says) in wrong {
        let head = [TOKEN_HEADER.as_bytes(), b": ", value, b"\r\n"].concat();
        let answer = exchange(server.address, &request("PUT", "/", head)).await.unwrap();
        assert_problem(&answer, 400, "malformed-token", says);
    }
    let twice = format!("{}{}", header(7), header(7));
    let answer = exchange(server.address, &request("PUT", "/", twice)).await.unwrap();
    assert_problem(&answer, 400, "malformed-token", "one token");
    assert!(handler.begun().is_empty());
    assert_eq!(mark_of(&*store).await, None);
}

#[tokio::test]
async fn a_token_of_another_lock_is_forbidden() {
    let (store, handler) = (Arc::new(MemoryFence::new()), Handler::open());
    let server = Server::start(fenced(&store), &handler).await;
    let head = format!("{TOKEN_HEADER}: orders/43=99\r\n");
    let answer = exchange(server.address, &request("PUT", "/", head)).await.unwrap();
    assert_problem(&answer, 403, "wrong-lock", "is one of `orders/43`");
    assert_eq!(answer.json()["expected"], LOCK);
    assert_eq!(answer.json()["given"], "orders/43");
    assert!(handler.begun().is_empty());
    assert_eq!(mark_of(&*store).await, None);
}

#[tokio::test]
async fn a_store_that_fails_lets_no_write_through() {
    let handler = Handler::open();
    let fence = FenceLayer::new(Arc::new(BrokenStore), "stock").unwrap().lock(LOCK).unwrap();
    let server = Server::start(fence, &handler).await;
    for _ in 0..2 {
        let answer = write(&server, 7).await;
        assert_problem(&answer, 503, "store-failed", "cannot be read or raised");
        assert!(!answer.body.contains("db.internal"), "the client is told of hosts: {answer:?}");
    }
    assert!(handler.begun().is_empty());
    // Reads need no store.
    let answer = exchange(server.address, &request("GET", "/", "")).await.unwrap();
    assert_eq!(answer.status, 200);
}

#[tokio::test]
async fn methods_that_only_read_pass_unless_all_are_checked() {
    let (store, handler) = (Arc::new(MemoryFence::new()), Handler::open());
    let server = Server::start(fenced(&store), &handler).await;
    let strict = Server::start(fenced(&store).check_all_methods(), &handler).await;
    for method in ["GET", "HEAD", "OPTIONS", "TRACE"] {
        let answer = exchange(server.address, &request(method, "/", "")).await.unwrap();
        assert_eq!(answer.status, 200, "{method}");
        let answer = exchange(strict.address, &request(method, "/", "")).await.unwrap();
        assert_eq!(answer.status, 428, "{method}");
    }
    // Nor does a read raise the mark.
    let answer = exchange(server.address, &request("GET", "/", header(9))).await.unwrap();
    assert_eq!((answer.status, mark_of(&*store).await), (200, None));
    let answer = exchange(strict.address, &request("GET", "/", header(9))).await.unwrap();
    assert_eq!((answer.status, mark_of(&*store).await), (200, Some(9)));
}

#[tokio::test]
async fn an_optional_token_may_be_missing_but_not_wrong() {
    let (store, handler) = (Arc::new(MemoryFence::new()), Handler::open());
    let server = Server::start(fenced(&store).optional(), &handler).await;
    let answer = exchange(server.address, &request("PUT", "/", "")).await.unwrap();
    assert_eq!((answer.status, answer.body.as_str()), (200, "no token"));
    let answer = write(&server, 8).await;
    assert_eq!((answer.status, answer.body.as_str()), (200, "orders/42=8"));
    assert_problem(&write(&server, 7).await, 409, "stale-token", "8 was seen");
    let malformed = format!("{TOKEN_HEADER}: 8\r\n");
    let answer = exchange(server.address, &request("PUT", "/", malformed)).await.unwrap();
    assert_problem(&answer, 400, "malformed-token", "form");
}

#[tokio::test]
async fn the_lock_can_follow_from_the_path() {
    let (store, handler) = (Arc::new(MemoryFence::new()), Handler::open());
    let fence = FenceLayer::new(store.clone(), "stock").unwrap().lock_by(|request| {
        let id = request.uri.path().strip_prefix("/orders/")?;
        Name::try_from(["orders", id]).ok()
    });
    let server = Server::start(fence, &handler).await;
    let put = async |path: &str, token: u64| {
        let answer = exchange(server.address, &request("PUT", path, header(token))).await;
        answer.unwrap()
    };
    assert_eq!(put("/orders/42", 8).await.status, 200);
    assert_problem(&put("/orders/43", 8).await, 403, "wrong-lock", "`orders/43`");
    assert_problem(&put("/orders/4%32", 8).await, 403, "wrong-lock", "`orders/4%2532`");
    assert_problem(&put("/", 8).await, 400, "no-lock", "no lock");
    assert_problem(&put("/orders/", 8).await, 400, "no-lock", "no lock");
    assert_problem(&put("/orders/42", 7).await, 409, "stale-token", "8 was seen");
    assert_eq!(handler.begun(), [8]);
}

#[tokio::test]
async fn the_resource_names_its_lock_unless_another_is_named() {
    let (store, handler) = (Arc::new(MemoryFence::new()), Handler::open());
    let server = Server::start(FenceLayer::new(store.clone(), LOCK).unwrap(), &handler).await;
    assert_eq!(write(&server, 8).await.status, 200);
    assert!(FenceLayer::new(store.clone(), "/stock").is_err());
    assert!(FenceLayer::new(store, "stock").unwrap().lock("").is_err());
}

/// Handlers of lower tokens end before one with a greater token begins.
#[tokio::test]
async fn a_greater_token_waits_for_lower_ones_in_the_handler() {
    let (store, handler) = (Arc::new(MemoryFence::new()), Handler::closed());
    let server = Arc::new(Server::start(fenced(&store), &handler).await);
    let send = |token| {
        let server = server.clone();
        tokio::spawn(async move { write(&server, token).await.status })
    };
    let first = send(7);
    let equal = send(7);
    handler.until_begun(&[7, 7]).await;
    let greater = send(8);
    server::until("the mark is raised", async || mark_of(&*store).await == Some(8)).await;
    // A stale request does not wait, and is not waited for.
    assert_eq!(write(&server, 7).await.status, 409);
    assert!(!handler.begins_within(Duration::from_millis(100), 3).await, "8 beside 7");
    handler.let_one_end();
    let first_ended = tokio::select! { status = first => status, status = equal => status };
    assert_eq!(first_ended.unwrap(), 200);
    assert!(!handler.begins_within(Duration::from_millis(100), 3).await, "8 beside the other 7");
    handler.let_one_end();
    handler.until_begun(&[7, 7, 8]).await;
    handler.let_one_end();
    assert_eq!(greater.await.unwrap(), 200);
}

#[tokio::test]
async fn other_locks_do_not_wait() {
    let (store, handler) = (Arc::new(MemoryFence::new()), Handler::closed());
    let fence = FenceLayer::new(store, "stock").unwrap();
    let fence = fence.lock_by(|request| request.uri.path().strip_prefix('/')?.parse().ok());
    let server = Server::start(fence, &handler).await;
    let put = |lock: &str, token: u64| {
        let head = format!("{TOKEN_HEADER}: {lock}={token}\r\n");
        let request = request("PUT", &format!("/{lock}"), &head);
        let address = server.address;
        tokio::spawn(async move { exchange(address, &request).await.unwrap().status })
    };
    let one = put("a", 1);
    handler.until_begun(&[1]).await;
    let other = put("b", 2);
    handler.until_begun(&[1, 2]).await;
    handler.let_one_end();
    handler.let_one_end();
    assert_eq!((one.await.unwrap(), other.await.unwrap()), (200, 200));
}

/// A request whose client hangs up while it waits makes room, and its handler never begins.
#[tokio::test]
async fn a_waiting_request_can_be_cancelled_and_their_number_is_bounded() {
    let (store, handler) = (Arc::new(MemoryFence::new()), Handler::closed());
    let server = Arc::new(Server::start(fenced(&store).max_waiting(1), &handler).await);
    let send = |token| {
        let server = server.clone();
        tokio::spawn(async move { write(&server, token).await })
    };
    let first = send(7);
    handler.until_begun(&[7]).await;
    let waiting = send(8);
    server::until("the mark is raised", async || mark_of(&*store).await == Some(8)).await;
    let too_many = write(&server, 9).await;
    assert_problem(&too_many, 503, "too-many-waiting", "repeat this one later");

    waiting.abort();
    assert!(waiting.await.unwrap_err().is_cancelled());
    let begun = Instant::now();
    let next = loop {
        let mut next = send(9);
        match tokio::time::timeout(Duration::from_millis(200), &mut next).await {
            // The server has not noticed yet.
            Ok(answer) => assert_problem(&answer.unwrap(), 503, "too-many-waiting", "repeat"),
            Err(_) => break next,
        }
        assert!(begun.elapsed() < Duration::from_secs(20), "the cancelled request still waits");
    };
    handler.let_one_end();
    assert_eq!(first.await.unwrap().status, 200);
    handler.until_begun(&[7, 9]).await;
    handler.let_one_end();
    assert_eq!(next.await.unwrap().status, 200);
}

#[tokio::test]
async fn a_request_that_is_cancelled_in_the_handler_is_not_waited_for() {
    let (store, handler) = (Arc::new(MemoryFence::new()), Handler::closed());
    let server = Arc::new(Server::start(fenced(&store), &handler).await);
    let send = |token| {
        let server = server.clone();
        tokio::spawn(async move { write(&server, token).await })
    };
    let first = send(7);
    handler.until_begun(&[7]).await;
    let next = send(8);
    server::until("the mark is raised", async || mark_of(&*store).await == Some(8)).await;
    first.abort();
    handler.until_begun(&[7, 8]).await;
    handler.let_one_end();
    assert_eq!(next.await.unwrap().status, 200);
}

#[tokio::test]
async fn a_client_layer_sends_the_token_of_its_guard() {
    let (store, handler) = (Arc::new(MemoryFence::new()), Handler::open());
    let server = Server::start(fenced(&store), &handler).await;
    let address = server.address;
    // An HTTP client as a service.
    let client = service_fn(move |sent: Request<String>| async move {
        let mut head = Vec::new();
        for (name, value) in sent.headers() {
            head.extend([name.as_str().as_bytes(), b": ", value.as_bytes(), b"\r\n"].concat());
        }
        let request = request(sent.method().as_str(), sent.uri().path(), &head);
        exchange(address, &request).await
    });
    let put = || Request::put("/").body(String::new()).unwrap();
    let locks = Lockset::connect("memory:").await.unwrap();
    let guard = locks.mutex(LOCK).unwrap().lock().await.unwrap();
    let fenced_client = FenceClientLayer::new(&guard).layer(client);
    let answer = fenced_client.clone().oneshot(put()).await.unwrap();
    assert_eq!((answer.status, answer.body), (200, format!("{LOCK}={}", guard.token())));
    guard.release().await.unwrap();

    let next = locks.mutex(LOCK).unwrap().lock().await.unwrap();
    let answer = FenceClientLayer::new(&next).layer(client).oneshot(put()).await.unwrap();
    assert_eq!(answer.status, 200);
    let late = fenced_client.clone().oneshot(put()).await.unwrap();
    assert_problem(&late, 409, "stale-token", "is stale");
    let two = FenceClientLayer::new(&next).layer(fenced_client);
    assert_problem(&two.oneshot(put()).await.unwrap(), 400, "malformed-token", "one token");

    let awkward = FencingToken::new("ä ö,=%", Token::new(7)).unwrap();
    let other = FenceClientLayer::new(&awkward).layer(client).oneshot(put()).await.unwrap();
    assert_problem(&other, 403, "wrong-lock", "`ä ö,=%`");
}

/// The layer needs neither axum nor a socket.
#[tokio::test]
async fn the_body_can_be_any_that_is_made_of_a_text() {
    let fence = FenceLayer::new(Arc::new(MemoryFence::new()), "stock").unwrap();
    let service = fence.layer(service_fn(async |_: Request<()>| {
        Ok::<_, std::convert::Infallible>(Response::new("done".to_owned()))
    }));
    let put = Request::put("/").body(()).unwrap();
    let response = service.clone().oneshot(put).await.unwrap();
    assert_eq!(response.status(), 428);
    let put = Request::put("/").header(TOKEN_HEADER, "stock=7").body(()).unwrap();
    assert_eq!(service.oneshot(put).await.unwrap().into_body(), "done");
}

mod laws {
    //! The laws of every store, on registers behind HTTP.
    lockset_testkit::fence_suite!(super::server::HttpRegister::new());
}
