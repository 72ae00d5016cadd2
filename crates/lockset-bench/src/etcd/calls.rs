//! The few calls of etcd that a peer makes, by hand: a client library would want `protoc`.
//!
//! Only the fields that are used are written down; what else a server sends is passed over.

use prost::Message;
use tonic::Request;
use tonic::client::Grpc;
use tonic::codegen::http::uri::PathAndQuery;
use tonic::transport::{Channel, Endpoint};
use tonic_prost::ProstCodec;

/// One channel to a server.
#[derive(Clone)]
pub(crate) struct Calls(Grpc<Channel>);

/// What there is below a prefix.
pub(crate) struct Below {
    pub(crate) keys: i64,
    /// Of the whole store: how many writes there were.
    pub(crate) revision: i64,
}

impl Calls {
    pub(crate) async fn connect(port: u16) -> Self {
        let endpoint = Endpoint::from_shared(format!("http://127.0.0.1:{port}")).unwrap();
        Self(Grpc::new(endpoint.tcp_nodelay(true).connect().await.unwrap()))
    }

    /// Waits for the lock of this name; answers the key by which it is held.
    pub(crate) async fn lock(&self, name: &str, lease: i64) -> Vec<u8> {
        let request = LockRequest { name: name.into(), lease };
        let answer: LockResponse = self.call("/v3lockpb.Lock/Lock", request).await;
        answer.key
    }

    pub(crate) async fn unlock(&self, key: Vec<u8>) {
        let Nothing {} = self.call("/v3lockpb.Lock/Unlock", UnlockRequest { key }).await;
    }

    /// A new lease for so many seconds.
    pub(crate) async fn lease(&self, ttl: i64) -> i64 {
        let request = LeaseGrantRequest { ttl };
        let answer: LeaseGrantResponse = self.call("/etcdserverpb.Lease/LeaseGrant", request).await;
        answer.id
    }

    pub(crate) async fn put(&self, key: &str, lease: i64) {
        let request = PutRequest { key: key.into(), lease };
        let Nothing {} = self.call("/etcdserverpb.KV/Put", request).await;
    }

    pub(crate) async fn delete(&self, key: &str) {
        let request = DeleteRangeRequest { key: key.into() };
        let Nothing {} = self.call("/etcdserverpb.KV/DeleteRange", request).await;
    }

    pub(crate) async fn below(&self, prefix: &str) -> Below {
        let (key, mut range_end) = (prefix.as_bytes().to_vec(), prefix.as_bytes().to_vec());
        *range_end.last_mut().expect("a prefix is not empty") += 1;
        let request = RangeRequest { key, range_end, count_only: true };
        let answer: RangeResponse = self.call("/etcdserverpb.KV/Range", request).await;
        let header = answer.header.expect("every answer has a header");
        Below { keys: answer.count, revision: header.revision }
    }

    async fn call<Q, A>(&self, path: &'static str, request: Q) -> A
    where
        Q: Message + 'static,
        A: Message + Default + 'static,
    {
        let mut grpc = self.0.clone();
        grpc.ready().await.unwrap();
        let codec = ProstCodec::<Q, A>::default();
        let path = PathAndQuery::from_static(path);
        grpc.unary(Request::new(request), path, codec).await.unwrap().into_inner()
    }
}

#[derive(Clone, PartialEq, Message)]
struct LockRequest {
    #[prost(bytes = "vec", tag = "1")]
    name: Vec<u8>,
    #[prost(int64, tag = "2")]
    lease: i64,
}

#[derive(Clone, PartialEq, Message)]
struct LockResponse {
    #[prost(bytes = "vec", tag = "2")]
    key: Vec<u8>,
}

#[derive(Clone, PartialEq, Message)]
struct UnlockRequest {
    #[prost(bytes = "vec", tag = "1")]
    key: Vec<u8>,
}

#[derive(Clone, PartialEq, Message)]
struct LeaseGrantRequest {
    #[prost(int64, tag = "1")]
    ttl: i64,
}

#[derive(Clone, PartialEq, Message)]
struct LeaseGrantResponse {
    #[prost(int64, tag = "2")]
    id: i64,
}

#[derive(Clone, PartialEq, Message)]
struct PutRequest {
    #[prost(bytes = "vec", tag = "1")]
    key: Vec<u8>,
    #[prost(int64, tag = "3")]
    lease: i64,
}

#[derive(Clone, PartialEq, Message)]
struct DeleteRangeRequest {
    #[prost(bytes = "vec", tag = "1")]
    key: Vec<u8>,
}

#[derive(Clone, PartialEq, Message)]
struct RangeRequest {
    #[prost(bytes = "vec", tag = "1")]
    key: Vec<u8>,
    #[prost(bytes = "vec", tag = "2")]
    range_end: Vec<u8>,
    #[prost(bool, tag = "9")]
    count_only: bool,
}

#[derive(Clone, PartialEq, Message)]
struct RangeResponse {
    #[prost(message, optional, tag = "1")]
    header: Option<ResponseHeader>,
    #[prost(int64, tag = "4")]
    count: i64,
}

#[derive(Clone, PartialEq, Message)]
struct ResponseHeader {
    #[prost(int64, tag = "3")]
    revision: i64,
}

/// An answer that says no more than that it was done.
#[derive(Clone, PartialEq, Message)]
struct Nothing {}
