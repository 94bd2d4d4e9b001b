// Search runs in a worker, which browsers refuse to pages opened from files. There a hidden frame does its work.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      this.frame = document.createElement("iframe");
      this.frame.hidden = true;
      document.body.appendChild(this.frame);
      const inside = this.frame.contentDocument;
      inside.open();
      inside.write(`<!doctype html><script>
        postMessage = (data) => parent.postMessage(data, "*");
        importScripts = (...urls) => urls.reduce((before, src) => before.then(() => new Promise((done, fail) => {
          const script = document.createElement("script");
          Object.assign(script, { src, onload: done, onerror: fail });
          document.body.appendChild(script);
        })), Promise.resolve());
      <\/script><body><script src="${new URL(url, location.href)}"><\/script></body>`);
      inside.close();
      window.addEventListener("message", (event) => {
        if (event.source !== this.frame.contentWindow) return;
        const message = new MessageEvent("message", { data: event.data });
        this.dispatchEvent(message);
        if (this.onmessage) this.onmessage(message);
      });
    }
    postMessage(data) {
      this.frame.contentWindow.dispatchEvent(new MessageEvent("message", { data }));
    }
    terminate() {
      this.frame.remove();
    }
  };
}
