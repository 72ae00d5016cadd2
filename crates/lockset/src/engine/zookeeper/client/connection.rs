//! The connection of a session: made, used, given up, and made again to another server.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};

use super::servers::{ServerStream, is_certificate_error};
use super::shared::SessionShared;
use super::wire::{self, ConnectResponse, JuteWriter, MAX_FRAME_LEN, OpCode};
use crate::clock::Moment;
use crate::engine::common::backoff;

/// Bounds of the pause after a connection that was used, whatever the session's timeout.
const RECONNECT_PAUSE: (Duration, Duration) =
    (Duration::from_millis(10), Duration::from_millis(500));
/// Minimum time for a server to accept a connection, and then to answer the handshake.
const MIN_CONNECT_TIMEOUT: Duration = Duration::from_millis(100);
/// Heartbeats per session timeout. See `SessionShared::reply_timeout` for what depends on it.
const HEARTBEATS_PER_TIMEOUT: u32 = 12;

/// Keeps the session connected until it has ended.
pub(super) async fn run(session: Arc<SessionShared>) {
    let mut server = rand::random_range(0..session.servers.count());
    let (mut failures, mut rejections, mut backoff) = (0, 0, backoff::RETRY);
    loop {
        while session.is_idle() {
            session.wake.notified().await;
        }
        match connect_session(&session, server).await {
            Ok(HandshakeOutcome::Connected { stream, response, sent_at }) => {
                (failures, rejections) = (0, 0);
                backoff.reset();
                session.on_connected(response, sent_at);
                let error = exchange(&session, stream).await;
                session.on_disconnected(error.to_string());
                if session.status.borrow().ended {
                    return;
                }
                // The pause spares a server in trouble. It also lets an operator who took the
                // session over end it. A silent server is left at once.
                if error.kind() != io::ErrorKind::TimedOut {
                    let (min, max) = RECONNECT_PAUSE;
                    tokio::time::sleep((session.timeout() / 20).clamp(min, max)).await;
                }
            }
            Ok(HandshakeOutcome::Expired) => {
                session.on_expired();
                if !session.recreates_expired {
                    return;
                }
                continue;
            }
            Err(error) => {
                failures += 1;
                rejections += usize::from(is_certificate_error(&error));
                let reason = session.servers.describe_error(server, &error);
                // A session that a server has accepted before may be accepted again.
                if rejections == session.servers.count() && session.was_never_accepted() {
                    session.on_rejected(&reason);
                    return;
                }
                session.on_disconnected(reason);
            }
        }
        server += 1;
        if failures >= session.servers.count() {
            (failures, rejections) = (0, 0);
            backoff.pause().await;
        }
    }
}

enum HandshakeOutcome {
    Connected { stream: Box<dyn ServerStream>, response: ConnectResponse, sent_at: Moment },
    Expired,
}

/// Connects to a server, and requests the session or a new one.
async fn connect_session(session: &SessionShared, server: usize) -> io::Result<HandshakeOutcome> {
    let count = u32::try_from(session.servers.count()).unwrap_or(u32::MAX);
    // Every server must have been tried before the session expires.
    let timeout = (session.reply_timeout() / count).max(MIN_CONNECT_TIMEOUT);
    let mut stream = session.servers.connect(server, timeout).await?;
    let request = session.connect_request();
    let mut w = JuteWriter::default();
    request.write(&mut w);
    if let Some(login) = &session.servers.login {
        w.frame(|w| {
            w.int(wire::AUTH_XID).int(OpCode::Auth as i32);
            w.int(0).string("digest").string(login);
        });
    }
    let sent_at = session.clock.now();
    let handshake = async {
        stream.write_all(&w.0).await?;
        stream.flush().await?;
        read_frame(&mut stream).await
    };
    let timed_out = || io::Error::new(io::ErrorKind::TimedOut, "no answer to the handshake");
    let frame = tokio::time::timeout(timeout, handshake).await.map_err(|_| timed_out())??;
    match ConnectResponse::read(&frame).map_err(|_| protocol_error())? {
        Some(response) => Ok(HandshakeOutcome::Connected { stream, response, sent_at }),
        None => Ok(HandshakeOutcome::Expired),
    }
}

async fn read_frame(stream: &mut Box<dyn ServerStream>) -> io::Result<Vec<u8>> {
    let length = usize::try_from(stream.read_u32().await?).unwrap_or(usize::MAX);
    if length > MAX_FRAME_LEN {
        return Err(protocol_error());
    }
    let mut frame = vec![0; length];
    stream.read_exact(&mut frame).await?;
    Ok(frame)
}

/// Writes requests and dispatches replies until the connection is no longer usable. Returns why.
async fn exchange(session: &SessionShared, mut stream: Box<dyn ServerStream>) -> io::Error {
    let (timeout, reply_timeout) = (session.timeout(), session.reply_timeout());
    let heartbeat_interval = timeout / HEARTBEATS_PER_TIMEOUT;
    let mut tick = tokio::time::interval((heartbeat_interval / 3).max(Duration::from_millis(5)));
    tick.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    let mut heartbeat_at = session.clock.now() + heartbeat_interval;
    let mut input = Vec::with_capacity(1 << 16);
    loop {
        let output = session.take_output();
        if !output.is_empty() {
            let writing = async {
                stream.write_all(&output).await?;
                stream.flush().await
            };
            match tokio::time::timeout(reply_timeout, writing).await {
                Ok(Ok(())) => {}
                Ok(Err(error)) => return error,
                Err(_) => return reply_timed_out(reply_timeout),
            }
        }
        tokio::select! {
            read = stream.read_buf(&mut input) => match read {
                Ok(0) => return io::Error::other("the server closed the connection"),
                Ok(_) => match dispatch_frames(session, &input) {
                    Some(used) => drop(input.drain(..used)),
                    None => return protocol_error(),
                },
                Err(error) => return error,
            },
            () = session.wake.notified() => {}
            _ = tick.tick() => {}
        }
        if session.take_reconnect_request() {
            return io::Error::other("a new connection was requested");
        }
        let now = session.clock.now();
        let is_late = |sent_at| now.saturating_duration_since(sent_at) > reply_timeout;
        if session.oldest_request_sent_at().is_some_and(is_late) {
            return reply_timed_out(reply_timeout);
        }
        if now >= heartbeat_at && !session.is_on_demand() {
            session.send_heartbeat();
            heartbeat_at = now + heartbeat_interval;
        }
    }
}

/// Dispatches all complete frames; returns how many bytes they took, or `None` if one is invalid.
fn dispatch_frames(session: &SessionShared, input: &[u8]) -> Option<usize> {
    let mut used = 0;
    while let Some((length, rest)) = input[used..].split_first_chunk::<4>() {
        let length = usize::try_from(u32::from_be_bytes(*length)).ok()?;
        if length > MAX_FRAME_LEN {
            return None;
        }
        let Some(frame) = rest.get(..length) else { break };
        session.dispatch_frame(frame).ok()?;
        used += 4 + length;
    }
    Some(used)
}

fn protocol_error() -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, "it does not speak ZooKeeper's protocol")
}

fn reply_timed_out(timeout: Duration) -> io::Error {
    io::Error::new(io::ErrorKind::TimedOut, format!("no answer within {timeout:?}"))
}
