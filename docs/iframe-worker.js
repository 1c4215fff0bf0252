// Search where pages are opened as files. Browsers start no worker there, so a hidden frame stands in for it. The theme's
// plugin `offline` would load such a script from another host.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super()
      const frame = document.body.appendChild(document.createElement("iframe"))
      frame.hidden = true
      const inside = this.inside = frame.contentWindow
      inside.document.open()
      // Scripts of a worker post to its owner, and load further scripts by their addresses, in order.
      inside.document.write('<body><script>var importScripts = (...urls) => urls.reduce((before, url) => before.then(() => ' +
        'new Promise((loaded, failed) => document.body.appendChild(Object.assign(document.createElement("script"), ' +
        '{src: url, onload: loaded, onerror: failed})))), Promise.resolve())</scr' + 'ipt>')
      inside.postMessage = data => this.dispatchEvent(new MessageEvent("message", {data}))
      inside.document.write(`<script src="${url}"></scr` + 'ipt>')
      inside.document.close()
      this.loaded = new Promise(loaded => frame.addEventListener("load", loaded))
    }
    postMessage(data) {
      this.loaded.then(() => this.inside.dispatchEvent(new MessageEvent("message", {data})))
    }
    terminate() {
      this.inside.frameElement.remove()
    }
  }
}
