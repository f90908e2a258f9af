// Draws a B-scan, its overlays and marks on a canvas; independent of the page and its events.
"use strict";
const octfmPaint = (() => {
  const bytes = (text) => Uint8Array.from(atob(text), (c) => c.charCodeAt(0));
  const int16 = (text) => new Int16Array(bytes(text).buffer);
  const float32 = (text) => new Float32Array(bytes(text).buffer);
  const clamp = (value, low, high) => Math.min(high, Math.max(low, value));
  const EMPTY = -32768, NONE = 255, LINE_STEPS = 16;

  // ---- tokens: what lies where ----

  // Token slice of a displayed B-scan, or -1.
  function tokenSlice(volume, bscan) {
    const [from, to] = volume.placement.bscans;
    const at = Math.floor((bscan + 0.5 - from) / (to - from) * volume.grid[0]);
    return at >= 0 && at < volume.grid[0] ? at : -1;
  }

  // Flat token index under a voxel, or -1.
  function tokenAt(volume, bscan, row, column) {
    if (!volume.placement) return -1;
    const [, h, w] = volume.grid, [left, right] = volume.placement.columns, [top, bottom] = volume.placement.rows[bscan];
    const d = tokenSlice(volume, bscan);
    const y = Math.floor((row + 0.5 - top) / (bottom - top) * h), x = Math.floor((column + 0.5 - left) / (right - left) * w);
    return d < 0 || y < 0 || y >= h || x < 0 || x >= w ? -1 : (d * h + y) * w + x;
  }

  // Middle voxel of a token: [B-scan, row, column].
  function voxelOf(volume, token) {
    const [d, h, w] = volume.grid, z = Math.floor(token / (h * w)), y = Math.floor(token / w) % h, x = token % w;
    const [from, to] = volume.placement.bscans, [left, right] = volume.placement.columns;
    const bscan = clamp(Math.floor(from + (z + 0.5) / d * (to - from)), 0, volume.shape[0] - 1), [top, bottom] = volume.placement.rows[bscan];
    return [bscan, Math.floor(top + (y + 0.5) / h * (bottom - top)), Math.floor(left + (x + 0.5) / w * (right - left))];
  }

  // RGBA of every token, and values to read out.
  function decodeTokens(overlay, count, maps) {
    if (overlay.rgba) return;
    overlay.rgba = new Uint8ClampedArray(4 * count);
    if (overlay.kind === "colours") {
      overlay.rgba.set(bytes(overlay.data));
    } else if (overlay.kind === "classes") {
      overlay.classes = bytes(overlay.data);
      overlay.classes.forEach((place, i) => place !== NONE && overlay.rgba.set([...overlay.legend[place].colour, 255], 4 * i));
    } else {
      overlay.values = overlay.data ? float32(overlay.data) : overlay.values;
      paint(overlay, maps);
    }
  }

  function paint(overlay, maps) {
    const stops = maps[overlay.low < 0 && overlay.key !== "similarity" ? "diverging" : "sequential"];
    const low = overlay.key === "similarity" ? 0 : overlay.low, span = overlay.high - low || 1;
    overlay.values.forEach((value, i) => {
      if (Number.isNaN(value)) { overlay.rgba[4 * i + 3] = 0; return; }
      const share = clamp((value - low) / span, 0, 1);
      overlay.rgba.set([...stops[Math.round(share * (stops.length - 1))], overlay.key === "similarity" && value <= 0 ? 0 : 255], 4 * i);
    });
    overlay.slices = {};
    overlay.front = null;
  }

  function canvasOf(width, height, rgba) {
    const canvas = document.createElement("canvas");
    canvas.width = width;
    canvas.height = height;
    canvas.getContext("2d").putImageData(new ImageData(rgba, width, height), 0, 0);
    return canvas;
  }

  function sliceCanvas(overlay, volume, d) {
    overlay.slices ||= {};
    const [, h, w] = volume.grid;
    overlay.slices[d] ||= canvasOf(w, h, overlay.rgba.slice(4 * d * h * w, 4 * (d + 1) * h * w));
    return overlay.slices[d];
  }

  // Seen from the front: the mean colour of the tokens of a column that have one.
  function frontCanvas(overlay, volume) {
    if (overlay.front) return overlay.front;
    const [d, h, w] = volume.grid, rgba = new Uint8ClampedArray(4 * d * w);
    for (let z = 0; z < d; z++) for (let x = 0; x < w; x++) {
      const sum = [0, 0, 0];
      let count = 0;
      for (let y = 0; y < h; y++) {
        const i = 4 * ((z * h + y) * w + x);
        if (!overlay.rgba[i + 3]) continue;
        for (let c = 0; c < 3; c++) sum[c] += overlay.rgba[i + c];
        count++;
      }
      if (count) rgba.set([...sum.map((s) => s / count), 255], 4 * (z * w + x));
    }
    overlay.front = canvasOf(w, d, rgba);
    return overlay.front;
  }

  // ---- on a canvas ----

  function place(context, source, x0, x1, y0, y1) {
    context.save();
    context.translate(x0, y0);
    context.scale(Math.sign(x1 - x0) || 1, Math.sign(y1 - y0) || 1);
    context.drawImage(source, 0, 0, Math.abs(x1 - x0), Math.abs(y1 - y0));
    context.restore();
  }

  // Surfaces in one of the kept B-scans.
  function drawLines(context, volume, overlay, kept, width, height) {
    overlay.rows ||= int16(overlay.data);
    const [, H] = volume.shape, count = overlay.columns, all = volume.kept.length;
    overlay.legend.forEach((entry, s) => {
      context.strokeStyle = `rgb(${entry.colour})`;
      context.lineWidth = Math.max(1.2, width / 500);
      context.beginPath();
      let pen = false;
      for (let x = 0; x < count; x++) {
        const row = overlay.rows[(s * all + kept) * count + x];
        if (row === EMPTY) { pen = false; continue; }
        const px = (x + 0.5) / count * width, py = (row / LINE_STEPS + 0.5) / H * height;
        pen ? context.lineTo(px, py) : context.moveTo(px, py);
        pen = true;
      }
      context.stroke();
    });
  }

  // An area in one of the kept B-scans; `loaded` is called once its picture is there.
  function drawArea(context, overlay, k, width, height, loaded) {
    overlay.images ||= {};
    if (!overlay.data[k]) return;
    if (!overlay.images[k]) {
      const image = new Image();
      image.addEventListener("load", () => { image.ready = true; loaded(k); });
      image.src = `data:image/png;base64,${overlay.data[k]}`;
      overlay.images[k] = image;
    }
    if (!overlay.images[k].ready) return;
    context.imageSmoothingEnabled = false;
    context.drawImage(overlay.images[k], 0, 0, width, height);
  }

  function cross(context, x, y, width, height) {
    context.lineWidth = Math.max(1, width / 700);
    for (const [colour, shift] of [["rgba(0,0,0,.6)", context.lineWidth], ["rgba(255,235,120,.9)", 0]]) {
      context.strokeStyle = colour;
      context.beginPath();
      context.moveTo(x + shift, 0); context.lineTo(x + shift, height);
      context.moveTo(0, y + shift); context.lineTo(width, y + shift);
      context.stroke();
    }
  }

  function mark(context, x, y, here) {
    const r = 6 * (window.devicePixelRatio || 1);
    context.strokeStyle = "#fff";
    context.lineWidth = 2;
    context.setLineDash(here ? [] : [3, 3]);
    context.beginPath();
    context.arc(x, y, r, 0, 2 * Math.PI);
    context.stroke();
    context.setLineDash([]);
  }

  function write(context, text, x, y, align, base) {
    context.font = `${13 * (window.devicePixelRatio || 1)}px system-ui, sans-serif`;
    context.textAlign = align;
    context.textBaseline = base;
    context.lineWidth = 3;
    context.strokeStyle = "rgba(0,0,0,.8)";
    context.strokeText(text, x, y);
    context.fillStyle = "#fff";
    context.fillText(text, x, y);
  }

  // Beside the middle, where the cursor lies when a page opens; of a B-scan, which has no `vertical`, in the vitreous.
  function drawSides(context, width, height, sides, vertical) {
    const dpr = window.devicePixelRatio || 1, pad = 6 * dpr, off = 12 * dpr;
    if (sides) {
      const [y, base] = vertical === undefined ? [pad, "top"] : [height / 2 - off, "middle"];
      write(context, sides[0], pad, y, "left", base);
      write(context, sides[1], width - pad, y, "right", base);
    }
    if (vertical) {
      write(context, vertical[0], width / 2 + off, pad, "center", "top");
      write(context, vertical[1], width / 2 + off, height - pad, "center", "bottom");
    }
  }

  // A millimetre across, and 0.2 mm down where the two scales differ; with a dark rim, as tissue may be white.
  function drawBars(context, width, height, wide, deep) {
    const dpr = window.devicePixelRatio || 1, pad = 10 * dpr, across = wide > 2 ? 1 : 0.2, y = height - pad, down = deep ? 0.2 / deep * height : 0;
    const bars = [[pad, y - 2, across / wide * width, 3], ...(deep ? [[pad, y - down, 3, down]] : [])];
    for (const [colour, rim] of [["rgba(0,0,0,.8)", dpr], ["#fff", 0]]) {
      context.fillStyle = colour;
      for (const [left, top, w, h] of bars) context.fillRect(left - rim, top - rim, w + 2 * rim, h + 2 * rim);
    }
    const roomy = deep && down > 32 * dpr;
    write(context, deep && !roomy ? `${across} mm across, 0.2 mm deep` : `${across} mm`, pad + (deep ? 6 * dpr : 0), y - 5, "left", "bottom");
    if (roomy) write(context, "0.2 mm", pad + 8, y - down, "left", "middle");
  }

  return { NONE, bytes, clamp, tokenSlice, tokenAt, voxelOf, decodeTokens, paint, sliceCanvas, frontCanvas, place, drawLines, drawArea,
    drawSides, drawBars, cross, mark };
})();
