"use strict";
// Draws the figures of the page with plotly.js, and again when a control or the color scheme changes.
(() => {
  const page = JSON.parse(document.getElementById("data").textContent);
  const places = [...document.querySelectorAll(".plot")];
  const chosen = { axis: "step", smoothing: 0, hidden: new Set() };
  const touch = matchMedia("(pointer: coarse)").matches;
  const buttons = [["zoom2d", "pan2d", "zoomIn2d", "zoomOut2d", "resetScale2d", "toImage"]];

  // "--a" is a color of the style, as the light or the dark scheme has it.
  function colored(value, style) {
    if (typeof value === "string") return value.startsWith("--") ? style.getPropertyValue(value).trim() : value;
    if (value === null || typeof value !== "object") return value;
    if (Array.isArray(value)) return typeof value[0] === "object" ? value.map(one => colored(one, style)) : value;
    return Object.fromEntries(Object.entries(value).map(([key, one]) => [key, colored(one, style)]));
  }

  // A mean that forgets: the weight of each point before is the smoothing's share of the weight of the next one.
  function smoothed(values, share) {
    let sum = 0, weight = 0;
    return values.map(value => {
      if (value === null) return null;
      sum = sum * share + value;
      weight = weight * share + 1;
      return sum / weight;
    });
  }

  // A curve as plotly.js takes it; one that is smoothed has what was measured behind it, faint.
  function curve(trace) {
    const shown = { ...trace, x: page.axes[trace.axis][chosen.axis], visible: !chosen.hidden.has(trace.run) };
    if (!trace.smooth || !chosen.smoothing) return [shown];
    const behind = { ...shown, opacity: 0.25, hoverinfo: "skip", hovertemplate: null };
    return [behind, { ...shown, y: smoothed(trace.y, chosen.smoothing) }];
  }

  // A constant, over the whole width of the curves.
  function baseline(trace, ends) {
    return { ...trace, x: ends, y: [trace.constant, trace.constant], visible: !chosen.hidden.has(trace.run) };
  }

  function traces(figure) {
    const curves = figure.traces.filter(trace => "axis" in trace && !chosen.hidden.has(trace.run));
    const xs = curves.flatMap(trace => page.axes[trace.axis][chosen.axis].filter(x => x !== null));
    const [least, most] = [xs.reduce((a, b) => Math.min(a, b), Infinity), xs.reduce((a, b) => Math.max(a, b), 0)];
    const ends = least < most ? [least, most] : [0, 2 * most || 1];  // the curves may be one point
    return figure.traces.flatMap(trace =>
      "axis" in trace ? curve(trace) : "constant" in trace ? baseline(trace, ends) :
        [{ ...trace, visible: !chosen.hidden.has(trace.run) }]);
  }

  const hasCurves = figure => figure.traces.some(trace => "axis" in trace);

  function layout(figure) {
    const ofCurves = hasCurves(figure);
    const axis = { gridcolor: "--line", zerolinecolor: "--line", linecolor: "--line", automargin: true };
    const own = figure.layout;
    const names = { step: "step", epoch: "epoch", seconds: "training time, s" };
    const xaxis = ofCurves ? { title: { text: names[chosen.axis] },
      unifiedhovertitle: { text: `${names[chosen.axis]} %{x:.6~g}` } } : {};
    return {
      height: 280, margin: { l: 10, r: 12, t: ofCurves ? 28 : 8, b: 10 }, paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
      font: { color: "--ink", family: "system-ui, sans-serif", size: 12 }, dragmode: touch ? false : "zoom",
      hovermode: ofCurves ? "x unified" : "closest", showlegend: false, uirevision: chosen.axis,
      hoverlabel: { bgcolor: "--paper", bordercolor: "--line", font: { color: "--ink" }, namelength: -1 },
      legend: { orientation: "h", x: 0, y: 1, yanchor: "bottom", traceorder: "normal" },
      modebar: { color: "--soft", activecolor: "--ink", bgcolor: "rgba(0,0,0,0)" },
      ...own, xaxis: { ...axis, ...titled(own.xaxis), ...xaxis }, yaxis: { ...axis, ...titled(own.yaxis) },
    };
  }

  function titled(axis) {
    return axis && axis.title ? { ...axis, title: { text: axis.title } } : axis || {};
  }

  function draw() {
    const style = getComputedStyle(document.documentElement);
    places.forEach((place, index) => {
      const figure = page.figures[index];
      Plotly.react(place, colored(traces(figure), style), colored(layout(figure), style),
        { responsive: true, displaylogo: false, modeBarButtons: buttons, displayModeBar: hasCurves(figure) && "hover" });
    });
  }

  for (const button of document.querySelectorAll(".runs button")) {
    button.addEventListener("click", () => {
      const run = Number(button.dataset.run), show = chosen.hidden.has(run);
      if (show) chosen.hidden.delete(run); else chosen.hidden.add(run);
      button.setAttribute("aria-pressed", String(show));
      draw();
    });
  }
  document.getElementById("axis")?.addEventListener("change", event => { chosen.axis = event.target.value; draw(); });
  document.getElementById("smoothing")?.addEventListener("input", event => {
    chosen.smoothing = Number(event.target.value);
    document.getElementById("smoothed").textContent = chosen.smoothing.toFixed(2);
    draw();
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
  // What is folded away has no width until it is opened.
  document.querySelectorAll("details").forEach(folded => folded.addEventListener("toggle", () => {
    if (folded.open) folded.querySelectorAll(".plot").forEach(place => Plotly.Plots.resize(place));
  }));
  draw();
})();
