//! Locks in a PostgreSQL database: a home for the promises, and the schema that the command prints.

use lockset_testkit::stage::PostgresSchema;

use crate::common::{Home, Servers, code, stderr, stdout};

pub(crate) fn home() -> Home {
    let schema = PostgresSchema::start();
    // The home in a ticket names no user, so it is that of the process.
    let user = std::process::Command::new("id").arg("-un").output().unwrap();
    let user = stdout(&user).trim_end().to_owned();
    let exists = format!("SELECT count(*) FROM pg_roles WHERE rolname = '{user}'");
    if schema.server().ask(&exists) == "0" {
        schema.server().ask(&format!("CREATE ROLE \"{user}\" LOGIN SUPERUSER"));
    }
    Home::on(schema)
}

impl Servers for PostgresSchema {
    fn url(&self) -> String {
        PostgresSchema::url(self)
    }

    fn engine(&self) -> &'static str {
        "postgres"
    }

    fn short_ttl(&self) -> &'static str {
        "500ms"
    }

    fn freeze(&self) {
        self.server().freeze();
    }

    fn thaw(&self) {
        self.server().thaw();
    }
}

#[test]
fn the_printed_schema_serves_a_role_that_may_not_create_one() {
    let schema = PostgresSchema::start();
    let (server, name) = (schema.server(), schema.name().to_owned());
    let worker = format!("worker_{name}");
    server.ask(&format!("CREATE ROLE {worker} LOGIN"));
    let url = format!("{}?schema={name}", server.url_of(&worker));
    let home = Home::new();
    let run = || home.lockset(&["-u", &url, "run", "x", "--", "echo", "done"]).output().unwrap();
    let refused = run();
    assert_eq!(code(&refused), 125);
    let said = stderr(&refused);
    assert!(said.contains(&format!("lockset schema postgres --schema {name} | psql")), "{said}");

    let printed = home.lockset(&["schema", "postgres", "--schema", &name]).output().unwrap();
    assert_eq!(code(&printed), 0, "{}", stderr(&printed));
    // Twice: it may be run again.
    for _ in 0..2 {
        server.ask(&format!("BEGIN; {} COMMIT;", stdout(&printed)));
    }
    let said = stderr(&run());
    assert!(said.contains("docs/postgres.md"), "it has no rights yet: {said}");
    server.ask(&format!(
        "GRANT USAGE ON SCHEMA {name} TO {worker};
         GRANT EXECUTE ON ALL FUNCTIONS IN SCHEMA {name} TO {worker}"
    ));
    let done = run();
    assert_eq!((code(&done), stdout(&done)), (0, "done\n".into()), "{}", stderr(&done));
    // It can use the functions, but not change what they store.
    let direct = server.psql(&worker, &format!("DELETE FROM {name}.lock"));
    assert!(String::from_utf8_lossy(&direct.stderr).contains("permission denied"));
}
