// Search in pages opened from a disk: browsers refuse workers of file://, so the theme's worker runs in a hidden frame.
if (location.protocol === "file:") {
  window.IFrameWorker = window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      this.loaded = new Promise((resolve) => {
        const attach = () => {
          document.body.append(frame);
          const inside = frame.contentWindow;
          inside.postMessage = (data) =>
            setTimeout(() => this.dispatchEvent(new MessageEvent("message", { data: structuredClone(data) })));
          const script = inside.document.createElement("script");
          script.src = new URL(url, location.href);
          script.onload = () => resolve(inside);
          inside.document.body.append(script);
        };
        if (document.body) attach();
        else addEventListener("DOMContentLoaded", attach);
      });
    }
    postMessage(message) {
      // Search takes the dashes of "--layouts" for an operator.
      const text = typeof message.data === "string";
      const data = text ? { ...message, data: message.data.replace(/(^|\s)-+/g, "$1") } : message;
      // Cloned inside, so that its arrays are arrays of the frame.
      this.loaded.then((inside) =>
        inside.dispatchEvent(new inside.MessageEvent("message", { data: inside.structuredClone(data) }))
      );
    }
    terminate() {}
  };
}
