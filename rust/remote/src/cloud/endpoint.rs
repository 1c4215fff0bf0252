//! Checks the address of a store in the environment: the client would accept any text, and panic at its first request.

use crate::redact::redacted_url;

/// Values that the client accepts as true.
const TRUE: [&str; 5] = ["1", "true", "on", "yes", "y"];

/// Checks the address in a variable. `allowing` is the variable that allows HTTP, `allowed` its value.
///
/// # Errors
/// Names the variable, its value without credentials, and what is allowed.
pub(super) fn check(
    (variable, address): (&str, Option<String>),
    (allowing, allowed): (&str, Option<String>),
) -> Result<(), String> {
    let Some(address) = address else {
        return Ok(());
    };
    let shown = redacted_url(&address);
    // The secret may have a slash, and be the port and the path of an address that seems right.
    if address.contains('@') {
        return Err(format!(
            "{variable} is {shown:?}: credentials in the address. Leave them out, and set them in variables of their own, \
             such as AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
        ));
    }
    let is_allowed = allowed.is_some_and(|value| TRUE.contains(&&*value.to_ascii_lowercase()));
    let (scheme, rest) = address.split_once("://").unwrap_or(("", &address));
    let host = rest.split('/').next().unwrap_or_default();
    let port = host.rsplit_once(':').map_or("0", |(_, port)| port);
    let is_host = !host.is_empty() && !host.contains(char::is_whitespace);
    let is_port = host.ends_with(']') || port.parse::<u16>().is_ok();
    if !["http", "https"].contains(&scheme) || !is_host || !is_port {
        return Err(format!(
            "{variable} is {shown:?}: not an address. Allowed: https://host or https://host:port, and http:// with \
             {allowing}=true"
        ));
    }
    if scheme == "http" && !is_allowed {
        return Err(format!(
            "{variable} is {shown:?}: http:// is not encrypted. Use https://, or set {allowing}=true in a network that \
             you trust"
        ));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn checked(address: &str, allowed: Option<&str>) -> Result<(), String> {
        let allowed = allowed.map(str::to_owned);
        check(("ENDPOINT", Some(address.to_owned())), ("ALLOW", allowed))
    }

    #[test]
    fn an_address_has_a_scheme_and_a_host() {
        for good in [
            "https://host",
            "https://host:8000/path",
            "https://[::1]:80",
            "https://[::1]",
        ] {
            assert_eq!(checked(good, None), Ok(()), "{good}");
        }
        assert_eq!(check(("ENDPOINT", None), ("ALLOW", None)), Ok(()));
        for bad in [
            "host",
            "127.0.0.1:80",
            "",
            "https://",
            "https:///x",
            "ftp://host",
            "https://a b",
            "https://h:x",
        ] {
            let text = checked(bad, Some("true")).unwrap_err();
            let words = format!("ENDPOINT is {bad:?}: not an address");
            assert!(text.starts_with(&words), "{text}");
        }
    }

    #[test]
    fn credentials_in_an_address_are_refused_and_not_shown() {
        for secret in [
            "https://user:hunter2@host",
            "https://user:12/hunter2@host:80/path",
            "http://hunter2@host",
            "user:hunter2@host",
            "ftp://hun@ter2@host",
        ] {
            for allowed in [Some("true"), None] {
                let text = checked(secret, allowed).unwrap_err();
                assert!(text.contains("AWS_SECRET_ACCESS_KEY"), "{text}");
                assert!(
                    !text.contains("hunter2") && !text.contains("ter2"),
                    "{text}"
                );
            }
        }
        let signed = checked("http://host/?sig=hunter2", None).unwrap_err();
        assert!(signed.contains("http://host/?..."), "{signed}");
        assert!(!signed.contains("hunter2"), "{signed}");
    }

    #[test]
    fn http_has_to_be_allowed() {
        for allowed in ["true", "1", "YES"] {
            assert_eq!(checked("http://host:80", Some(allowed)), Ok(()));
        }
        for not in [None, Some("false"), Some("")] {
            let text = checked("http://host:80", not).unwrap_err();
            assert!(text.contains("ALLOW=true"), "{text}");
        }
    }
}
