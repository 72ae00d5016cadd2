//! Texts that are not URLs, and URLs that are unusual. The check is run by property tests and by
//! `fuzz/`.

use super::{Url, percent_decode, percent_encode};

/// Any text: it is a URL that can be shown and used, or an error that does not repeat it.
#[allow(clippy::unwrap_used, clippy::panic, reason = "checks")]
pub(crate) fn check_url(text: &str) {
    assert_eq!(percent_decode(&percent_encode(text)).as_deref(), Some(text));
    let url: Url = match text.parse() {
        Ok(url) => url,
        Err(error) => {
            assert!(error.to_string().contains("(not shown)"), "{error}");
            return;
        }
    };
    let shown = url.to_string();
    // What was hidden is a single character.
    assert!(shown.len() <= text.len() + 3 * (2 + text.matches([',', '&']).count()), "{shown}");
    let _ = (url.redact(text), url.ttl(), url.token_base(), url.allow_options(&["prefix"]));
    let added = url.clone().with_password("pa:ss/WORD-9,?");
    if let Ok(with_password) = added {
        assert!(!with_password.to_string().contains("WORD-9"), "{with_password}");
    }
    #[cfg(any(feature = "redis", feature = "etcd", feature = "zookeeper"))]
    if let Ok(servers) = url.servers(7, "form") {
        assert!(!servers.hosts.is_empty() && servers.hosts.len() == servers.logins.len());
        for server in &servers.hosts {
            let (host, port) = super::parse_host(&super::host_port(server), 9).unwrap();
            assert_eq!((&host, port), (&server.0, server.1));
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use proptest::prelude::*;

    use super::*;

    const SCHEMES: &str = "(memory|local|rediss?(\\+sentinel|\\+cluster)?|redlocks?|etcds?|zks?)";

    const LIKE_URLS: &str = "SCHEME:(//)?([a-z%4]{0,3}:[a-z:,/?@#%41é]{0,6}@)?\
        [a-z0-9\\[\\]:,.]{0,12}(/[a-z%40é]{0,6})?(\\?[a-z_=&%@]{0,12})?";

    proptest! {
        #[test]
        fn any_text_is_a_url_or_rejected(text in "\\PC{0,40}") {
            check_url(&text);
        }

        #[test]
        fn texts_like_urls_are_urls_or_rejected(
            text in prop::string::string_regex(&LIKE_URLS.replace("SCHEME", SCHEMES)).unwrap(),
        ) {
            check_url(&text);
        }

        /// However it is written: with escapes, or with characters that should be escaped.
        #[test]
        fn no_password_is_shown(
            scheme in SCHEMES,
            user in "[a-z]{0,4}",
            password in "[A-Z0-9:@/?#,&=%é+]{4,12}",
            raw in any::<bool>(),
            rest in "(,j:7)?(/path)?(\\?ttl=5s)?",
        ) {
            prop_assume!(!["memory", "local"].contains(&scheme.as_str()));
            let written = if raw { password.clone() } else { percent_encode(&password) };
            let url = format!("{scheme}://{user}:{written}@host{rest}");
            let url: Url = url.parse().unwrap();
            let mut errors = vec![url.to_string(), format!("{url:?}")];
            errors.extend(url.ttl().err().map(|error| error.to_string()));
            errors.extend(url.token_base().err().map(|error| error.to_string()));
            errors.extend(url.allow_options(&[]).err().map(|error| error.to_string()));
            #[cfg(any(feature = "redis", feature = "etcd", feature = "zookeeper"))]
            errors.extend(url.servers(1, "form").err().map(|error| error.to_string()));
            // A piece that is a valid host cannot be told from one.
            #[cfg(any(feature = "redis", feature = "etcd", feature = "zookeeper"))]
            prop_assume!(!raw || url.servers(1, "form").is_err());
            // Capital letters, digits and é are only in the password.
            let parts = password.split(|c: char| !c.is_alphanumeric()).filter(|p| p.len() > 2);
            for part in parts {
                for shown in &errors {
                    let shown = shown.replace(char::is_lowercase, "");
                    prop_assert!(!shown.contains(part), "{part} of {password} in {shown}");
                }
            }
        }

        #[cfg(any(feature = "redis", feature = "etcd", feature = "zookeeper"))]
        #[test]
        fn an_escaped_login_arrives(user in "[^\\pC]{1,8}", password in "[^\\pC]{1,8}") {
            for scheme in ["redis", "etcd", "redlock", "zk"] {
                let login = format!("{}:{}", percent_encode(&user), percent_encode(&password));
                let url: Url = format!("{scheme}://{login}@host/path").parse().unwrap();
                let login = url.servers(1, "form").unwrap().logins.remove(0).unwrap();
                prop_assert_eq!((&login.user, &login.password), (&user, &password));
                let redacted = url.redact(&format!("for {password}"));
                let is_hidden = !redacted.contains(&password) || "***for ".contains(&password);
                prop_assert!(is_hidden, "{}", redacted);
            }
        }

        #[test]
        fn times_are_exact_or_rejected(number in any::<u64>(), unit in "(ms|s|m|h|d|)") {
            let number = number >> (number % 64);
            let url: Url = format!("memory:?ttl={number}{unit}").parse().unwrap();
            let millis = match unit.as_str() {
                "ms" => Some(1_u128),
                "s" => Some(1_000),
                "m" => Some(60_000),
                "h" => Some(3_600_000),
                _ => None,
            };
            let expected = millis
                .map(|millis| u128::from(number) * millis)
                .filter(|millis| (1..=86_400_000).contains(millis))
                .map(|millis| Duration::from_millis(u64::try_from(millis).unwrap()));
            prop_assert_eq!(url.ttl().ok().flatten(), expected);
        }
    }
}
