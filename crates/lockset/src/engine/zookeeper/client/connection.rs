//! The connection of a session: made, kept, given up, and made again to another server.

use std::sync::Arc;
use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};

use super::super::connect::{Stream, is_refusal};
use super::session::Shared;
use super::wire::{self, Hello, LONGEST_FRAME, Op, Writer};
use crate::clock::Moment;

/// The pauses between rounds of attempts at all servers.
const PAUSES: (Duration, Duration) = (Duration::from_millis(20), Duration::from_millis(500));
/// The pause after a connection that was used, whatever the session's timeout.
const RESPITE: (Duration, Duration) = (Duration::from_millis(10), Duration::from_millis(500));
/// A sign of life is given so many times per timeout.
const BEATS: u32 = 12;

/// Keeps the session connected until it has ended.
pub(in crate::engine::zookeeper) async fn keep(session: Arc<Shared>) {
    let mut server = rand::random_range(0..session.servers.count());
    let (mut failures, mut refusals, mut pause) = (0, 0, PAUSES.0);
    loop {
        while session.is_unwanted() {
            session.wake.notified().await;
        }
        match greet(&session, server).await {
            Ok(Greeted::Welcome(stream, welcome, sent)) => {
                (failures, refusals, pause) = (0, 0, PAUSES.0);
                session.welcomed(welcome, sent);
                let why = serve(&session, stream).await;
                session.cut(why.to_string());
                if session.status.borrow().ended {
                    return;
                }
                // A server that stumbles is not to be overrun, and whoever took the session over to
                // end it, as an operator does, must be able to. From one that fell silent we turn
                // away at once.
                if why.kind() != std::io::ErrorKind::TimedOut {
                    tokio::time::sleep((session.timeout() / 20).clamp(RESPITE.0, RESPITE.1)).await;
                }
            }
            Ok(Greeted::Expired) => {
                session.expired();
                if !session.begins_again {
                    return;
                }
                continue;
            }
            Err(why) => {
                failures += 1;
                refusals += usize::from(is_refusal(&why));
                let why = session.servers.told(server, &why);
                // One that was accepted before, or by others, may be so again.
                if refusals == session.servers.count() && session.was_never_accepted() {
                    session.give_up(&why);
                    return;
                }
                session.cut(why);
            }
        }
        server += 1;
        if failures >= session.servers.count() {
            (failures, refusals) = (0, 0);
            tokio::time::sleep(pause).await;
            pause = (pause * 2).min(PAUSES.1);
        }
    }
}

enum Greeted {
    Welcome(Box<dyn Stream>, Hello, Moment),
    Expired,
}

/// Connects to a server, and asks for the session or for a new one.
async fn greet(session: &Shared, server: usize) -> std::io::Result<Greeted> {
    let count = u32::try_from(session.servers.count()).unwrap_or(u32::MAX);
    let patience = session.patience();
    // All servers must have had their chance before the session expires.
    let within = (patience / count).max(Duration::from_millis(100));
    let mut stream = session.servers.connect(server, within).await?;
    let hello = session.hello();
    let mut w = Writer::default();
    hello.write(&mut w);
    if let Some(login) = session.servers.login() {
        w.frame(|w| {
            w.int(wire::AUTH_XID).int(Op::Auth as i32);
            w.int(0).text("digest").text(login);
        });
    }
    let sent = session.clock.now();
    let handshake = async {
        stream.write_all(&w.0).await?;
        stream.flush().await?;
        read_frame(&mut stream).await
    };
    let late = || std::io::Error::new(std::io::ErrorKind::TimedOut, "no answer to the handshake");
    let frame = tokio::time::timeout(within, handshake).await.map_err(|_| late())??;
    match wire::welcome(&frame).map_err(|_| garbled())? {
        Some(welcome) => Ok(Greeted::Welcome(stream, welcome, sent)),
        None => Ok(Greeted::Expired),
    }
}

async fn read_frame(stream: &mut Box<dyn Stream>) -> std::io::Result<Vec<u8>> {
    let length = usize::try_from(stream.read_u32().await?).unwrap_or(usize::MAX);
    if length > LONGEST_FRAME {
        return Err(garbled());
    }
    let mut frame = vec![0; length];
    stream.read_exact(&mut frame).await?;
    Ok(frame)
}

fn garbled() -> std::io::Error {
    std::io::Error::new(std::io::ErrorKind::InvalidData, "it does not speak as ZooKeeper does")
}

/// Writes what is asked and reads what is answered, until the connection cannot be used any more;
/// answers why.
async fn serve(session: &Shared, mut stream: Box<dyn Stream>) -> std::io::Error {
    let (timeout, patience) = (session.timeout(), session.patience());
    let mut tick = tokio::time::interval((timeout / BEATS / 3).max(Duration::from_millis(5)));
    tick.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    let mut beat_at = session.clock.now() + timeout / BEATS;
    let mut input = Vec::with_capacity(1 << 16);
    loop {
        let output = session.outgoing();
        if !output.is_empty() {
            let writing = async {
                stream.write_all(&output).await?;
                stream.flush().await
            };
            match tokio::time::timeout(patience, writing).await {
                Ok(Ok(())) => {}
                Ok(Err(error)) => return error,
                Err(_) => return silent(patience),
            }
        }
        tokio::select! {
            read = stream.read_buf(&mut input) => match read {
                Ok(0) => return std::io::Error::other("the server closed the connection"),
                Ok(_) => match heed_frames(session, &input) {
                    Some(used) => drop(input.drain(..used)),
                    None => return garbled(),
                },
                Err(error) => return error,
            },
            () = session.wake.notified() => {}
            _ = tick.tick() => {}
        }
        if session.is_to_reconnect() {
            return std::io::Error::other("the connection is made anew");
        }
        let now = session.clock.now();
        if session
            .waits_since()
            .is_some_and(|since| now.saturating_duration_since(since) > patience)
        {
            return silent(patience);
        }
        if now >= beat_at && !session.rests() {
            session.beat();
            beat_at = now + timeout / BEATS;
        }
    }
}

/// Heeds all frames that have arrived in full; answers how many bytes they took.
fn heed_frames(session: &Shared, input: &[u8]) -> Option<usize> {
    let mut used = 0;
    while let Some((length, rest)) = input[used..].split_first_chunk::<4>() {
        let length = usize::try_from(u32::from_be_bytes(*length)).ok()?;
        if length > LONGEST_FRAME {
            return None;
        }
        let Some(frame) = rest.get(..length) else { break };
        session.heed(frame).ok()?;
        used += 4 + length;
    }
    Some(used)
}

fn silent(patience: Duration) -> std::io::Error {
    let why = format!("no answer within {patience:?}");
    std::io::Error::new(std::io::ErrorKind::TimedOut, why)
}
