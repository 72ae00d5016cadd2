//! Locks on a ZooKeeper server, whose sessions are leases: what the command says about that.

use std::time::Duration;

use lockset_testkit::stage::{Chroot, SESSIONS};

use crate::common::{Home, Servers, code, stderr, stdout};

pub(crate) fn home() -> Home {
    Home::on(Chroot::<1>::start(""))
}

impl Servers for Chroot<1> {
    fn url(&self) -> String {
        Chroot::url(self)
    }

    fn engine(&self) -> &'static str {
        "zookeeper"
    }

    fn short_ttl(&self) -> &'static str {
        "500ms"
    }

    /// What the server that leads has not heard of is not believed.
    fn trust(&self, ttl: Duration) -> Duration {
        ttl * 2 / 3
    }

    fn freeze(&self) {
        self.servers().freeze();
    }

    fn thaw(&self) {
        self.servers().thaw();
    }
}

#[test]
fn a_ttl_that_the_server_grants_is_not_spoken_of() {
    let home = home();
    let args = ["run", "--ttl", "7s", "x", "--", "sh", "-c", "echo $LOCKSET_TTL_MS"];
    let output = home.lockset(&args).output().unwrap();
    assert_eq!((code(&output), stdout(&output)), (0, "7000\n".into()), "{output:?}");
    assert_eq!(stderr(&output), "");
}

#[test]
fn a_ttl_that_the_server_does_not_grant_is_told_and_the_command_gets_the_true_one() {
    let home = home();
    let (shortest, longest) = SESSIONS;
    for (asked, granted, shown) in [("100ms", shortest, "200ms"), ("1h", longest, "1m")] {
        let args = ["run", "--ttl", asked, "x", "--", "sh", "-c", "echo $LOCKSET_TTL_MS"];
        let output = home.lockset(&args).output().unwrap();
        let expected = format!("{}\n", granted.as_millis());
        assert_eq!((code(&output), stdout(&output)), (0, expected), "{output:?}");
        let said = stderr(&output);
        assert!(said.contains(shown) && said.lines().count() == 1, "{said:?}");
    }
}
