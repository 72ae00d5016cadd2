//! What the Redis engine expects of the `redis` crate beyond its documentation.
//!
//! The crate was once pinned to one version because of this. A pin makes Lockset unresolvable next
//! to any crate that needs a newer version, so the expectations are tests instead. Run them with
//! the lowest and with the newest allowed version; CONTRIBUTING has the commands.
#![allow(clippy::unwrap_used, reason = "tests")]

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::mpsc::{Receiver, channel};
use std::time::Duration;

use redis::aio::MultiplexedConnection;
use redis::{AsyncConnectionConfig, ConnectionAddr, PushInfo, PushKind, Value};

/// A server that passes what it receives to `reply`, and sends what that returns.
fn server(reply: impl Fn(&str) -> String + Send + 'static) -> u16 {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    std::thread::spawn(move || {
        let (mut stream, _): (TcpStream, _) = listener.accept().unwrap();
        let mut bytes = [0; 64 * 1024];
        while let Ok(length @ 1..) = stream.read(&mut bytes) {
            let text = String::from_utf8_lossy(&bytes[..length]).into_owned();
            let answer = match text.contains("HELLO") || text.contains("CLIENT") {
                true => "%1\r\n$5\r\nproto\r\n:3\r\n".to_owned() + &"+OK\r\n".repeat(setup(&text)),
                false => reply(&text),
            };
            if answer == "close" || stream.write_all(answer.as_bytes()).is_err() {
                return;
            }
        }
    });
    port
}

/// The number of commands after `HELLO` by which the crate sets up a connection.
fn setup(text: &str) -> usize {
    text.split('*').filter(|command| command.contains("CLIENT")).count()
}

async fn connect(port: u16) -> (MultiplexedConnection, Receiver<PushInfo>) {
    let (sender, pushes) = channel();
    let addr = ConnectionAddr::Tcp("127.0.0.1".to_owned(), port);
    let info = redis::IntoConnectionInfo::into_connection_info(addr).unwrap();
    let settings = info.redis_settings().clone().set_protocol(redis::ProtocolVersion::RESP3);
    let client = redis::Client::open(info.set_redis_settings(settings)).unwrap();
    let config = AsyncConnectionConfig::new().set_response_timeout(None).set_push_sender(
        move |push: PushInfo| -> Result<(), std::convert::Infallible> {
            let _ = sender.send(push);
            Ok(())
        },
    );
    let connection = client.get_multiplexed_async_connection_with_config(&config).await.unwrap();
    (connection, pushes)
}

fn next(pushes: &Receiver<PushInfo>) -> PushInfo {
    pushes.recv_timeout(Duration::from_secs(5)).unwrap()
}

/// The engine closes a connection by this push. Without it, a lost connection would be noticed by
/// the next probe only, seconds later.
#[tokio::test(flavor = "multi_thread")]
async fn the_end_of_a_connection_is_pushed() {
    let (mut connection, pushes) = connect(server(|_| "close".to_owned())).await;
    let error = redis::cmd("GET").arg("x").query_async::<Value>(&mut connection).await.unwrap_err();
    assert!(error.is_io_error() || error.is_connection_dropped(), "{error:?}");
    assert_eq!(next(&pushes).kind, PushKind::Disconnection);
}

/// When a slot moves, the server ends the subscription to a sharded channel without a request. The
/// crate takes that push for the reply to the oldest request, so all later replies are shifted by
/// one: a `GET` returned the reply to another one. The engine closes the connection on this push,
/// and trusts no reply after it. The crate must show the push before it hands out the wrong reply.
#[tokio::test(flavor = "multi_thread")]
async fn an_unrequested_unsubscription_is_pushed_before_a_reply_is_shifted() {
    let unsubscribed = ">3\r\n$12\r\nsunsubscribe\r\n$1\r\nc\r\n:0\r\n";
    let port = server(move |_| format!("{unsubscribed}$5\r\nright\r\n"));
    let (mut connection, pushes) = connect(port).await;
    let _: redis::RedisResult<Value> =
        redis::cmd("GET").arg("x").query_async(&mut connection).await;
    assert_eq!(next(&pushes).kind, PushKind::SUnsubscribe);
}

/// Messages and invalidations come as pushes with the parts that the engine reads.
#[tokio::test(flavor = "multi_thread")]
async fn messages_and_invalidations_have_their_parts() {
    let message = ">3\r\n$7\r\nmessage\r\n$1\r\nc\r\n$4\r\ntext\r\n";
    let keys = ">2\r\n$10\r\ninvalidate\r\n*2\r\n$1\r\na\r\n$1\r\nb\r\n";
    let flushed = ">2\r\n$10\r\ninvalidate\r\n_\r\n";
    let port = server(move |_| format!("{message}{keys}{flushed}$5\r\nright\r\n"));
    let (mut connection, pushes) = connect(port).await;
    let reply: String = redis::cmd("GET").arg("x").query_async(&mut connection).await.unwrap();
    assert_eq!(reply, "right", "pushes do not take the place of a reply");
    let bulk = |text: &str| Value::BulkString(text.as_bytes().to_vec());
    let (message, keys, flushed) = (next(&pushes), next(&pushes), next(&pushes));
    assert_eq!((message.kind, message.data.get(1)), (PushKind::Message, Some(&bulk("text"))));
    let both = Value::Array(vec![bulk("a"), bulk("b")]);
    assert_eq!((keys.kind, keys.data.first()), (PushKind::Invalidate, Some(&both)));
    assert_eq!((flushed.kind, flushed.data.first()), (PushKind::Invalidate, Some(&Value::Nil)));
}

/// `CLIENT CACHING YES` applies to the next command, so nothing may come between the two.
#[tokio::test(flavor = "multi_thread")]
async fn a_pipeline_is_sent_without_a_gap() {
    let (sender, received) = channel();
    let port = server(move |text| {
        let commands = text.matches('*').count();
        let _ = sender.send(text.to_owned());
        "+OK\r\n".repeat(commands)
    });
    let (connection, _pushes) = connect(port).await;
    let requests = (0..50).map(|number| {
        let mut connection = connection.clone();
        tokio::spawn(async move {
            let mut pipeline = redis::pipe();
            pipeline.cmd("FIRST").arg(number).cmd("SECOND").arg(number);
            pipeline.query_async::<()>(&mut connection).await.unwrap();
        })
    });
    for request in requests.collect::<Vec<_>>() {
        request.await.unwrap();
    }
    let all: String = received.try_iter().collect();
    let words: Vec<&str> = all.split("\r\n").filter(|word| !word.starts_with(['*', '$'])).collect();
    for number in 0..50 {
        let number = number.to_string();
        let at = words.windows(4).position(|four| four == ["FIRST", &number, "SECOND", &number]);
        assert!(at.is_some(), "the commands of pipeline {number} are not together");
    }
}
