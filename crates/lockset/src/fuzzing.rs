//! What `fuzz/` needs of the library's inside. Only built with `--cfg fuzzing`.

#![allow(missing_docs, reason = "not a part of the API")]

use crate::engine::{etcd, redis, zookeeper};

pub fn redis_push(bytes: &[u8]) {
    redis::malformed::check_pushes(bytes);
}

/// The bytes of a reply, as they come from the socket.
pub fn redis_reply(bytes: &[u8]) {
    if let Ok(reply) = ::redis::parse_redis_value(bytes) {
        redis::malformed::check_reply(&reply);
    }
}

pub fn etcd_key_value(key: &[u8], value: &[u8]) {
    etcd::malformed::check_key_value(key, value);
}

pub fn zookeeper_frame(frame: &[u8]) {
    zookeeper::malformed::check_frame(frame);
}

pub fn zookeeper_node(path: &str, data: &[u8]) {
    zookeeper::malformed::check_path(path);
    zookeeper::malformed::check_data(data);
}

pub fn url(text: &str) {
    crate::url::malformed::check_url(text);
}
