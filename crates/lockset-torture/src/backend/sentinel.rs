//! A Redis master with two replicas and three sentinels.

use lockset_testkit::stage::RedisSentinel;
use rustix::process::Signal;

use super::{Backend, EngineKind, Strike, redis, unsupported};
use crate::schedule::Fault;

#[derive(Debug)]
pub(super) struct SentinelBackend {
    servers: RedisSentinel,
}

impl SentinelBackend {
    pub(super) fn start() -> Self {
        Self { servers: RedisSentinel::start() }
    }
}

impl Backend for SentinelBackend {
    fn url(&self, _: usize) -> String {
        self.servers.url()
    }

    fn strike(&self, fault: Fault, _: u64) -> Strike<'_> {
        let all = &self.servers;
        let master = all.master();
        let server = &all.servers()[master];
        let target = format!("master {master}");
        match fault {
            Fault::LeaderKill => {
                server.kill();
                Strike::new(target, move || {
                    all.await_promotion(master);
                    all.bring_back(master);
                })
            }
            Fault::LeaderStop => {
                server.signal(Signal::STOP);
                Strike::new(target, move || {
                    all.await_promotion(master);
                    all.resume(master);
                })
            }
            Fault::CutOff => {
                all.cut_off_master();
                Strike::new(target, move || {
                    all.lose_master(master);
                    all.bring_back(master);
                })
            }
            Fault::Disconnect | Fault::ScriptFlush => redis::ask(server, fault, &target),
            _ => unsupported(EngineKind::Sentinel, fault),
        }
    }
}
