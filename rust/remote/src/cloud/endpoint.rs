//! Checks the address of a store in the environment: the client would accept any text, and panic at its first request.

use crate::location::is_this_machine;
use crate::redact::redacted_url;

/// Values that the client accepts as true.
const TRUE: [&str; 5] = ["1", "true", "on", "yes", "y"];

/// Whether the client takes the value of a setting as true.
pub(super) fn is_true(value: &str) -> bool {
    TRUE.contains(&&*value.to_ascii_lowercase())
}

/// The settings of a store's client that protect what is sent.
#[derive(Clone, Default)]
pub(super) struct Settings<'a> {
    /// Addresses of the store, each with its variable.
    pub(super) addresses: &'a [(&'static str, Option<String>)],
    pub(super) allows_http: Option<String>,
    pub(super) allows_any_certificate: Option<String>,
}

/// Checks the settings. Their variables begin with `prefix`. Returns why others on the network may read what is sent.
///
/// # Errors
/// Names the variable, its value without credentials, and what is allowed.
pub(super) fn check(prefix: &str, settings: Settings<'_>) -> Result<Option<String>, String> {
    if let Some(value) = settings
        .allows_any_certificate
        .filter(|value| is_true(value))
    {
        return Err(format!(
            "{prefix}_ALLOW_INVALID_CERTIFICATES is {value:?}: then anybody on the network can be the store. Certificates are \
             always verified: unset it, and name the certificate of the store's root in SSL_CERT_FILE"
        ));
    }
    let allows_http = settings.allows_http.is_some_and(|value| is_true(&value));
    let mut exposure = None;
    for (variable, address) in settings.addresses {
        if let Some(address) = address {
            let found = address_of(prefix, (variable, address), allows_http)?;
            exposure = exposure.or(found);
        }
    }
    Ok(exposure)
}

/// Checks the address in a variable. Returns why others on the network may read what is sent there.
fn address_of(
    prefix: &str,
    (variable, address): (&str, &str),
    allows_http: bool,
) -> Result<Option<String>, String> {
    let shown = redacted_url(address);
    // The secret may have a slash, and be the port and the path of an address that seems right.
    if address.contains('@') {
        return Err(format!(
            "{variable} is {shown:?}: credentials in the address. Leave them out, and set them in variables of their own, \
             such as AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
        ));
    }
    let (scheme, rest) = address.split_once("://").unwrap_or(("", address));
    let host = rest.split('/').next().unwrap_or_default();
    let (name, port) = match host.rsplit_once(':') {
        Some((name, port)) if !host.ends_with(']') => (name, port),
        _ => (host, "0"),
    };
    let is_host = !host.is_empty() && !host.contains(char::is_whitespace);
    if !["http", "https"].contains(&scheme) || !is_host || port.parse::<u16>().is_err() {
        return Err(format!(
            "{variable} is {shown:?}: not an address. Allowed: https://host or https://host:port, and http:// with \
             {prefix}_ALLOW_HTTP=true"
        ));
    }
    if scheme == "https" || allows_http && is_this_machine(name) {
        return Ok(None);
    }
    if !allows_http {
        return Err(format!(
            "{variable} is {shown:?}: http:// is not encrypted. Use https://, or set {prefix}_ALLOW_HTTP=true in a network \
             that you trust"
        ));
    }
    Ok(Some(format!(
        "{variable} is {shown:?}: tokens and blocks are not encrypted on the network"
    )))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn checked(address: &str, allowed: Option<&str>) -> Result<Option<String>, String> {
        let settings = Settings {
            addresses: &[("ENDPOINT", Some(address.to_owned()))],
            allows_http: allowed.map(str::to_owned),
            ..Settings::default()
        };
        check("STORE", settings)
    }

    #[test]
    fn an_address_has_a_scheme_and_a_host() {
        for good in [
            "https://host",
            "https://host:8000/path",
            "https://[::1]:80",
            "https://[::1]",
        ] {
            assert_eq!(checked(good, None), Ok(None), "{good}");
        }
        assert_eq!(check("STORE", Settings::default()), Ok(None));
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
            let exposure = checked("http://host:80", Some(allowed)).unwrap().unwrap();
            assert!(
                exposure.contains("ENDPOINT is \"http://host:80\""),
                "{exposure}"
            );
            for near in ["http://127.0.0.1:80", "http://localhost/x", "http://[::1]"] {
                assert_eq!(checked(near, Some(allowed)), Ok(None), "{near}");
            }
        }
        for not in [None, Some("false"), Some("")] {
            let text = checked("http://host:80", not).unwrap_err();
            assert!(text.contains("STORE_ALLOW_HTTP=true"), "{text}");
        }
    }
    #[test]
    fn certificates_are_always_verified() {
        for value in ["true", "1", "Yes"] {
            let any = Settings {
                allows_any_certificate: Some(value.to_owned()),
                ..Settings::default()
            };
            let text = check("STORE", any).unwrap_err();
            assert!(
                text.contains("STORE_ALLOW_INVALID_CERTIFICATES is"),
                "{text}"
            );
            assert!(text.contains("SSL_CERT_FILE"), "{text}");
        }
        let none = Settings {
            allows_any_certificate: Some("false".to_owned()),
            ..Settings::default()
        };
        assert_eq!(check("STORE", none), Ok(None));
    }
}
